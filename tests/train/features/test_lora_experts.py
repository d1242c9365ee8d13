"""LoRA beside experts and latent attention: what PEFT makes of it, merged, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.stacks.lora import LoraSettings
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.lora import LoraFeature
from tests.support.models import moe_models
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.lora_runs import (
    TOKENS,
    assert_same_as_peft,
    fill_adapters,
    load,
    logits,
    make_training,
    state,
    step,
    write,
)
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

ALL = ("qkv", "proj", "fc1", "fc2")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("mixtral", ALL),
    ("deepseek_v3", ALL),
]
SLOW: list[tuple[str, tuple[str, ...]]] = [
    ("mixtral", ("fc1",)),
    ("mixtral", ("fc2",)),
    ("deepseek_v2", ("qkv",)),
    ("gpt_oss", ALL),
    ("gpt_oss", ("fc1",)),
    ("llama4", ALL),
    ("llama4", ("fc2",)),
    ("qwen2_moe", ALL),
    ("qwen3_moe", ALL),
    ("deepseek_v2", ALL),
    ("deepseek_v3", ("qkv",)),
    ("qwen3_next", ("qkv", "proj")),
]


def saved(folder: Path, case: str) -> Path:
    family, _, keys = moe_models.CASES[case]
    tiny_model(family, folder, sizes=moe_models.SIZES, **keys)
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("deepseek"), "deepseek_v3")


@pytest.mark.parametrize(
    ("case", "roles"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_peft_computes_the_same(case, roles, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", case)
    assert_same_as_peft(base, tmp_path, LoraSettings(rank=4, alpha=6.0, seed=3, roles=roles))


def test_latents_in_a_cache_see_the_adapter(deepseek: Path) -> None:
    stages, kind = load(deepseek)
    fill_adapters(LoraFeature(stages, LoraSettings(rank=4, alpha=6.0), kind, str(deepseek)))
    whole = logits(stages)
    cache = ContiguousCache(stages[0].config, num_rows=2, max_tokens=16)
    with torch.inference_mode():
        stages[0](Batch(tokens_BS=TOKENS[:, :11]), cache)
        last = stages[0](Batch(tokens_BS=TOKENS[:, 11:]), cache)
    assert torch.allclose(last, whole[:, 11:], atol=1e-5)


def test_a_run_goes_on_with_the_same_bits(deepseek: Path, tmp_path: Path) -> None:
    stages, lora, optimizer = make_training(deepseek, ProcessGroups.alone(), sharded=False)
    for n in range(2):
        step(stages, optimizer, n)
    write(lora, optimizer, tmp_path, 2)
    again, other, theirs = make_training(deepseek, ProcessGroups.alone(), sharded=False)
    assert other.resume(tmp_path, theirs).iteration == 2
    step(stages, optimizer, 2)
    step(again, theirs, 2)
    ours, resumed = state(lora, optimizer), state(other, theirs)
    name = "decoder.layers.1.mlp.experts.experts.linear_fc1.lora_B"
    assert ours[f"weight:{name}"].shape == (8, 48, 4)
    assert f"exp_avg_sq:{name}" in ours
    assert ours.keys() == resumed.keys()
    assert all(torch.equal(ours[n], resumed[n]) for n in ours)


LAYOUTS: list[tuple[dict[str, int], bool]] = [
    ({"tp": 2, "etp": 1, "ep": 2}, True),
    ({"tp": 2}, False),
    ({"tp": 2}, True),
    ({"ep": 2, "dp": 2}, False),
    ({"dp": 2, "ep": 1, "etp": 2}, False),
]


def learned(path: str, layout: dict[str, int], sp: bool) -> dict[str, Tensor]:
    groups = ProcessGroups.start(ParallelConfig(**layout)) if layout else ProcessGroups.alone()
    how: dict[str, Any] = {"sharded": groups.dp.size > 1, "sequence_parallel": sp}
    stages, lora, optimizer = make_training(Path(path), groups, **how)
    fill_adapters(lora)
    optimizer.reload_parameters()
    for n in range(2):
        step(stages, optimizer, n)
    return state(lora, optimizer)


def on_ranks(rank: int, size: int, path: str, number: int) -> dict[str, Tensor]:
    return learned(path, *LAYOUTS[number])


SOME = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(LAYOUTS)))]


@pytest.mark.parametrize("number", SOME, ids=lambda n: str(LAYOUTS[n]))
def test_every_layout_learns_the_same(deepseek: Path, number: int) -> None:
    alone = learned(str(deepseek), {}, False)
    found, other = run_world(on_ranks, 2, str(deepseek), number)
    assert not other
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.allclose(found[name], tensor, atol=2e-5, rtol=2e-3), name


def test_dropout_of_experts_is_refused(deepseek: Path) -> None:
    stages, kind = load(deepseek)
    with pytest.raises(UsageError, match=r"dropout 0\.1 for experts"):
        LoraFeature(stages, LoraSettings(rank=4, alpha=6.0, dropout=0.1), kind, str(deepseek))
