"""LoRA in a run: what PEFT makes of its adapters, merged weights, and runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.checkpoint.storage.files import Files
from megtool.config import ParallelConfig
from megtool.errors import CheckpointError
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.lora import LoraSettings, adapters_of, merge
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import PlainOptimizer
from megtool.optim.settings import OptimizerSettings
from megtool.parallel.process_groups import ProcessGroups
from megtool.reshard.open_source import open_source
from megtool.reshard.source import CheckpointSource
from megtool.train.build_model import load_for_training
from megtool.train.features.adapter_gather import WEIGHT, Gathering
from megtool.train.features.lora import FOLDER, Lora, frozen_print
from megtool.train.features.peft_format import CONFIG_FILE
from megtool.train.train_state import Standing
from tests.support.models import dense_families
from tests.support.worlds.gloo_world import run_world

TOKENS = torch.randint(1, 100, (2, 12), generator=torch.Generator().manual_seed(1))
SETTINGS = LoraSettings(rank=4, alpha=6.0, seed=3)
FAMILIES = [
    (*dense_families.LLAMA, dense_families.SIZES),
    (*dense_families.QWEN2, dense_families.SIZES),
    (*dense_families.PHI3, dense_families.SIZES),
    (*dense_families.GPT2, dense_families.GPT2_SIZES),
]


def saved(folder: Path, name: str, sizes: dict[str, Any]) -> Path:
    transformers = pytest.importorskip("transformers")
    config_name = {"PHI3": "Phi3"}.get(name, name)
    torch.manual_seed(0)
    config = getattr(transformers, f"{config_name}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "Llama", dense_families.SIZES)


def load(path: Path, groups: ProcessGroups | None = None, **how: Any) -> tuple[list[Decoder], Any]:
    torch.set_num_threads(1)
    opened = open_source(path)
    assert opened.model is not None
    assert opened.model.family is not None
    source = CheckpointSource(
        catalogue=opened.catalogue, side=opened.side, config=opened.model.config
    )
    stages = load_for_training(source, groups, dtype="float32", threads=1, **how)
    return stages, opened.model.family


def noisy(lora: Lora) -> None:
    """Give B something to say, the same at every layout."""
    whole = {}
    for n, matrix in enumerate(sorted(Gathering(lora.views).matrices, key=lambda m: m.name)):
        torch.manual_seed(n)
        whole[matrix.key] = torch.randn(matrix.shape) * 0.1
    with torch.no_grad():
        for name, parameter in lora.views.tensors.items():
            parameter.copy_(lora.views.local(whole, WEIGHT, name))


def write(lora: Lora, optimizer: Optimizer | None, folder: Path, iteration: int = 1) -> None:
    standing = Standing(
        iteration=iteration, consumed_samples=4 * iteration, num_steps=4 * iteration
    )
    for name, data in lora.files(optimizer, standing, folder / "spool", Files()).items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(data, Path):
            data.rename(folder / name)
        else:
            (folder / name).write_bytes(data)


def logits(stages: list[Decoder]) -> Tensor:
    stages[0].eval()
    with torch.inference_mode():
        return stages[0](Batch(tokens_BS=TOKENS)).clone()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[0])
def test_peft_computes_the_same(family, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", family[2], family[3])
    same_as_peft(base, tmp_path, SETTINGS)


def same_as_peft(base: Path, folder: Path, settings: LoraSettings) -> None:
    """peft computes what we do with an adapter that we wrote, and so do both when it is merged."""
    peft = pytest.importorskip("peft", reason="the peft package is the oracle")
    transformers = pytest.importorskip("transformers")
    stages, kind = load(base)
    plain = logits(stages)
    lora = Lora(stages, settings, kind, str(base))
    assert torch.equal(logits(stages), plain)  # B is zero
    noisy(lora)
    ours = logits(stages)
    assert (ours - plain).abs().max() > 1e-2
    write(lora, None, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, folder / FOLDER).eval()
    with torch.no_grad():
        assert torch.allclose(adapted(TOKENS).logits, ours, atol=1e-5, rtol=1e-5)
    merge(stages)
    assert torch.allclose(logits(stages), ours, atol=1e-6)
    with torch.no_grad():
        alone = adapted.merge_and_unload()(TOKENS).logits
    assert torch.allclose(logits(stages), alone, atol=1e-5, rtol=1e-5)


def step(stages: list[Decoder], optimizer: Optimizer, number: int) -> None:
    groups = stages[0].groups
    tokens = torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(number))
    mine = tokens.chunk(groups.dp.size)[groups.dp.rank]
    stages[0].train()
    torch.manual_seed(number)
    optimizer.zero_grad()
    optimizer.begin(1)
    loss, _ = stages[0].loss(Batch(tokens_BS=mine), mine.roll(-1, 1))
    loss.backward()
    optimizer.finish(torch.tensor(32.0))
    assert optimizer.step(1e-2, 0.1).ok
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.wait_for_parameters()


def made(
    path: Path, groups: ProcessGroups, *, sharded: bool, dropout: float = 0.0, **how: Any
) -> tuple[list[Decoder], Lora, Optimizer]:
    stages, family = load(path, groups, **how)
    lora = Lora(stages, LoraSettings(rank=4, alpha=6.0, dropout=dropout), family, str(path))
    named = list(stages[0].named_parameters())
    settings = OptimizerSettings(lr=1e-2, clip_grad=0.5)
    optimizer = (
        DistributedOptimizer(named, settings, groups, chunks=stages)
        if sharded
        else PlainOptimizer(named, settings, groups)
    )
    return stages, lora, optimizer


def state(lora: Lora, optimizer: Optimizer) -> dict[str, Tensor]:
    """All matrices by their keys, on rank 0."""
    gathering = Gathering(lora.views, optimizer.pieces())
    return {matrix.key: whole for matrix, whole in gathering if whole is not None}


def test_only_the_adapter_learns_and_a_run_goes_on_with_the_same_bits(llama, tmp_path) -> None:
    stages, lora, optimizer = made(llama, ProcessGroups.alone(), sharded=False, dropout=0.2)
    frozen = {n: t.clone() for n, t in stages[0].state_dict().items() if ".adapter." not in n}
    assert {f.name for f in optimizer.facts} == set(lora.views.tensors)
    for n in range(2):
        step(stages, optimizer, n)
    held = stages[0].state_dict()
    assert all(torch.equal(held[n], t) for n, t in frozen.items())
    write(lora, optimizer, tmp_path, 2)
    for n in range(2, 4):
        step(stages, optimizer, n)
    again, other, theirs = made(llama, ProcessGroups.alone(), sharded=False, dropout=0.2)
    found = other.resume(tmp_path, theirs)
    assert (found.iteration, found.consumed_samples, theirs.num_steps) == (2, 8, 2)
    for n in range(2, 4):
        step(again, theirs, n)
    ours, resumed = state(lora, optimizer), state(other, theirs)
    assert ours.keys() == resumed.keys()
    assert any(n.startswith("exp_avg_sq:") for n in ours)
    assert all(torch.equal(ours[n], resumed[n]) for n in ours)
    told = json.loads((tmp_path / FOLDER / CONFIG_FILE).read_bytes())
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (4, 6.0, 0.2)


def test_an_adapter_of_another_model_is_refused(llama, tmp_path) -> None:
    _, lora, optimizer = made(llama, ProcessGroups.alone(), sharded=False)
    with pytest.raises(CheckpointError, match="no adapter to go on with"):
        lora.resume(tmp_path, optimizer)
    write(lora, optimizer, tmp_path)
    other = saved(tmp_path / "other", "Llama", dense_families.SIZES | {"tie_word_embeddings": True})
    _, theirs, optimizer = made(other, ProcessGroups.alone(), sharded=False)
    with torch.no_grad():
        next(adapters_of(theirs.stages[0]))[1].weight.add_(0.1)
    theirs._print = frozen_print(theirs.stages)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        theirs.resume(tmp_path, optimizer)


def on_ranks(
    rank: int, size: int, path: str, layout: dict[str, int], sp: bool
) -> dict[str, Tensor]:
    groups = ProcessGroups.start(ParallelConfig(**layout))
    stages, lora, optimizer = made(
        Path(path), groups, sharded=groups.dp.size > 1, dropout=0.25, sequence_parallel=sp
    )
    noisy(lora)
    optimizer.reload_parameters()
    for n in range(3):
        step(stages, optimizer, n)
    return state(lora, optimizer)


@pytest.mark.parametrize(("layout", "sp"), [({"tp": 2}, False), ({"tp": 2}, True)])
def test_tensor_parallel_ranks_learn_the_same(llama, layout, sp) -> None:
    alone = on_ranks(0, 1, str(llama), {}, False)
    found, other = run_world(on_ranks, 2, str(llama), layout, sp)
    assert not other
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.allclose(found[name], tensor, atol=2e-5, rtol=1e-3), name


def print_on_ranks(rank: int, size: int, path: str, layout: dict[str, int]) -> tuple[float, float]:
    stages, _ = load(Path(path), ProcessGroups.start(ParallelConfig(**layout)))
    return frozen_print(stages)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_frozen_weights_are_known_again_at_every_layout(llama, layout) -> None:
    stages, _ = load(llama)
    value, room = frozen_print(stages)
    for found, its_room in run_world(print_on_ranks, 2, str(llama), layout):
        assert abs(found - value) <= 1e-12 * room
        assert its_room == pytest.approx(room)
    with torch.no_grad():
        weight = stages[0].get_parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
        weight[0] += 1e-3
    assert abs(frozen_print(stages)[0] - value) > 1e-6


def resumed_on_ranks(rank: int, size: int, path: str, folder: str) -> dict[str, Tensor]:
    groups = ProcessGroups.start(ParallelConfig(dp=2))
    _, lora, optimizer = made(Path(path), groups, sharded=True)
    lora.resume(Path(folder), optimizer)
    return state(lora, optimizer)


def test_state_goes_from_one_process_to_two_replicas(llama, tmp_path) -> None:
    stages, lora, optimizer = made(llama, ProcessGroups.alone(), sharded=False)
    step(stages, optimizer, 0)
    write(lora, optimizer, tmp_path)
    before = state(lora, optimizer)
    found, other = run_world(resumed_on_ranks, 2, str(llama), str(tmp_path))
    assert not other
    assert found.keys() == before.keys()
    assert all(torch.equal(found[n], before[n]) for n in before)
