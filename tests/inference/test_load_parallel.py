"""Ranks that each load their part, on real gloo processes, against the whole model in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool import reshard
from megtool.errors import LayoutError
from megtool.inference.forward import Forward
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.model.stacks.pipeline import hidden_of_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import MEGATRON_ORDER, PIPELINE_BEFORE_DATA
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models import tiny_llama
from tests.support.runs.loading import source_of
from tests.support.worlds.gloo_world import run_world

TOKENS = torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(1))


def logits(
    rank: int, size: int, folder: str, layout: dict[str, int], how: dict[str, Any]
) -> Tensor | None:
    """What a rank of the last stage computes."""
    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig(**layout))
    try:
        decoder = load(source_of(Path(folder)), groups=groups, dtype="float32", threads=1, **how)
        with torch.no_grad():
            x_TH = hidden_of_stages([decoder], Batch(tokens_BS=TOKENS))
            return None if x_TH is None else decoder.logits(x_TH)
    finally:
        groups.stop()


def check(folder: Path, layout: dict[str, int], size: int, **how: Any) -> None:
    decoder = load(source_of(folder), dtype="float32")
    with torch.no_grad():
        want = decoder.logits(decoder.hidden(Batch(tokens_BS=TOKENS)))
    found = [y for y in run_world(logits, size, str(folder), layout, how) if y is not None]
    assert len(found) == size // layout.get("pp", 1)
    for y in found:
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("layout", "size", "how"),
    [
        ({"tp": 2}, 2, {}),
        pytest.param({"tp": 2}, 2, {"stream_layers": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, 2, {}, marks=pytest.mark.slow),
        ({"pp": 2}, 2, {"stream_layers": True}),
        pytest.param({"tp": 4}, 4, {}, marks=pytest.mark.slow),  # more ranks than KV heads
        pytest.param({"tp": 2, "pp": 2}, 4, {"stream_layers": True}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 2, {"sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_llama(
    tied: bool, layout: dict[str, int], size: int, how: dict[str, Any], tmp_path: Path
) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", tie_word_embeddings=tied)
    check(tmp_path / "hf", layout, size, **how)


def agreed(rank: int, size: int, folder: str, order: str) -> list[int]:
    """The next token of every row, as this rank is told it."""
    groups = ProcessGroups.start(ParallelConfig(pp=2, dp=2), order=order)
    try:
        decoder = load(source_of(Path(folder)), groups=groups, dtype="float32", threads=1)
        return next_tokens(Forward(decoder))
    finally:
        groups.stop()


def next_tokens(forward: Forward) -> list[int]:
    with torch.no_grad():
        x_TH = forward.hidden(Batch(tokens_BS=TOKENS))
    last = None if x_TH is None else forward.logits(x_TH.unflatten(0, TOKENS.shape)[:, -1])
    found: list[int] = forward.agree(
        None if last is None else last.argmax(-1), len(TOKENS)
    ).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("order", [MEGATRON_ORDER, PIPELINE_BEFORE_DATA])
def test_all_ranks_are_told_what_the_last_stage_chose(order: str, tmp_path: Path) -> None:
    """Whichever rank that stage is, which the order of the axes decides."""
    folder = tiny_llama.save(tmp_path / "hf", dtype="float32")
    expected = next_tokens(Forward(load(source_of(folder), dtype="float32")))
    assert all(expected)
    assert run_world(agreed, 4, str(folder), order) == [expected] * 4


@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [
        pytest.param("qwen3_moe", {"ep": 2, "dp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {"tp": 2, "ep": 2, "etp": 1}, 2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"tp": 2, "ep": 2, "etp": 2, "dp": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_mixtures_of_experts(name: str, layout: dict[str, int], size: int, tmp_path: Path) -> None:
    from tests.support.models import moe_cases  # not in every rank: it takes seconds

    moe_cases.save(next(c for c in moe_cases.CASES if c[0] == name), tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "mcore", to="torch_dist", fsync=False, tp=2)
    check(tmp_path / "mcore", layout, size)


def refusal(rank: int, size: int, folder: str) -> str:
    groups = ProcessGroups.start(ParallelConfig(tp=size))
    try:
        with pytest.raises(LayoutError) as e:
            load(source_of(Path(folder)), groups=groups)
        return str(e.value)
    finally:
        groups.stop()


def test_every_rank_is_told_of_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf")
    said = run_world(refusal, 3, str(tmp_path / "hf"))
    assert all("tp=3 does not divide num_heads=4" in text for text in said)
