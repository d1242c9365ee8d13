"""LoRA in a run: what PEFT makes of its adapters, merged weights, and runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.adapters.peft_config import CONFIG_FILE
from megtool.errors import CheckpointError
from megtool.model.stacks.lora import LoraSettings, adapters_of
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.frozen_weights import fingerprint_frozen_weights
from megtool.train.features.lora import FOLDER
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.lora_runs import (
    assert_same_as_peft,
    fill_adapters,
    load,
    make_training,
    state,
    step,
    write,
)
from tests.support.worlds.gloo_world import run_world

SETTINGS = LoraSettings(rank=4, alpha=6.0, seed=3)
FAMILIES = ["llama", "qwen2", "phi3", "gpt2"]


def saved(folder: Path, family: str, **keys: Any) -> Path:
    tiny_model(family, folder, **keys)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same(family, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", family)
    assert_same_as_peft(base, tmp_path, SETTINGS)


def test_only_the_adapter_learns_and_a_run_goes_on_with_the_same_bits(llama, tmp_path) -> None:
    stages, lora, optimizer = make_training(
        llama, ProcessGroups.alone(), sharded=False, dropout=0.2
    )
    frozen = {n: t.clone() for n, t in stages[0].state_dict().items() if ".adapter." not in n}
    assert {f.name for f in optimizer.param_infos} == set(lora.views.tensors)
    for n in range(2):
        step(stages, optimizer, n)
    held = stages[0].state_dict()
    assert all(torch.equal(held[n], t) for n, t in frozen.items())
    write(lora, optimizer, tmp_path, 2)
    for n in range(2, 4):
        step(stages, optimizer, n)
    again, other, theirs = make_training(llama, ProcessGroups.alone(), sharded=False, dropout=0.2)
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
    _, lora, optimizer = make_training(llama, ProcessGroups.alone(), sharded=False)
    with pytest.raises(CheckpointError, match="no adapter to resume"):
        lora.resume(tmp_path, optimizer)
    write(lora, optimizer, tmp_path)
    other = saved(tmp_path / "other", "llama", tie_word_embeddings=True)
    _, theirs, optimizer = make_training(other, ProcessGroups.alone(), sharded=False)
    with torch.no_grad():
        next(adapters_of(theirs.stages[0]))[1].weight.add_(0.1)
    theirs._fingerprint = fingerprint_frozen_weights(theirs.stages)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        theirs.resume(tmp_path, optimizer)


def on_ranks(
    rank: int, size: int, path: str, layout: dict[str, int], sp: bool
) -> dict[str, Tensor]:
    groups = ProcessGroups.start(ParallelConfig(**layout))
    stages, lora, optimizer = make_training(
        Path(path), groups, sharded=groups.dp.size > 1, dropout=0.25, sequence_parallel=sp
    )
    fill_adapters(lora)
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
    return fingerprint_frozen_weights(stages)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_frozen_weights_are_known_again_at_every_layout(llama, layout) -> None:
    stages, _ = load(llama)
    value, room = fingerprint_frozen_weights(stages)
    for found, its_room in run_world(print_on_ranks, 2, str(llama), layout):
        assert abs(found - value) <= 1e-12 * room
        assert its_room == pytest.approx(room)
    with torch.no_grad():
        weight = stages[0].get_parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
        weight[0] += 1e-3
    assert abs(fingerprint_frozen_weights(stages)[0] - value) > 1e-6


def resumed_on_ranks(rank: int, size: int, path: str, folder: str) -> dict[str, Tensor]:
    groups = ProcessGroups.start(ParallelConfig(dp=2))
    _, lora, optimizer = make_training(Path(path), groups, sharded=True)
    lora.resume(Path(folder), optimizer)
    return state(lora, optimizer)


def test_state_goes_from_one_process_to_two_replicas(llama, tmp_path) -> None:
    stages, lora, optimizer = make_training(llama, ProcessGroups.alone(), sharded=False)
    step(stages, optimizer, 0)
    write(lora, optimizer, tmp_path)
    before = state(lora, optimizer)
    found, other = run_world(resumed_on_ranks, 2, str(llama), str(tmp_path))
    assert not other
    assert found.keys() == before.keys()
    assert all(torch.equal(found[n], before[n]) for n in before)
