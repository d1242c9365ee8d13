"""Scales from histories: Transformer Engine's documented formulas, and this house's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.number_formats import delayed_scaling
from megtool.optim.fp8.amax_history import AmaxHistories, update_scales
from megtool.optim.fp8.config import Fp8Config
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import start

ODD = [0.0, 1e-45, 1e-38, 1e-3, 1.0, 448.0, 3e38, float("inf"), float("nan")]


def documented(amax: float, before: float, fp8_max: float, margin: int) -> float:
    """The four cases of Transformer Engine's `_default_sf_compute`, one by one, in fp32."""
    a = np.float32(amax)
    if not np.isfinite(a) or a <= 0:
        return before
    with np.errstate(over="ignore"):
        found = np.float32(fp8_max) / a / np.float32(2.0**margin)
    return float(np.finfo(np.float32).max if np.isinf(found) else found)


@given(
    st.lists(st.sampled_from(ODD) | st.floats(0, 2.0**99, width=32), min_size=1, max_size=8),
    st.sampled_from([448.0, 57344.0]),
    st.integers(-3, 8),
)
@settings(max_examples=100, deadline=None)
def test_scales_are_the_documented_ones(amaxes: list[float], fp8_max: float, margin: int) -> None:
    before = torch.arange(1.0, len(amaxes) + 1)
    got = update_scales(torch.tensor(amaxes), before, fp8_max, margin)
    want = [documented(a, float(b), fp8_max, margin) for a, b in zip(amaxes, before, strict=True)]
    assert got.tolist() == want
    read = delayed_scaling.scale(np.array(amaxes, np.float32), before.numpy(), fp8_max, margin)
    assert got.tolist() == read.tolist()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("format", ["hybrid", "e4m3"])
def test_a_run_of_steps(algorithm: Any, length: int, format: Any) -> None:
    """Rolled as Transformer Engine rolls: row 0 is empty after a step, the newest comes last."""
    how = Fp8Config(
        fp8_amax_history_len=length,
        fp8_amax_compute_algo=algorithm,
        fp8_margin=1,
        fp8_format=format,
        fp8_recipe="delayed",
    )
    histories = AmaxHistories(2, how)
    assert histories.is_fresh == [True, True]
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(9, 2, 5, generator=generator) * 10
    history = torch.zeros(length, 2, 5)
    for step in range(9):
        for module in range(2):
            for column in range(5):
                direction, at = ("fwd", column) if column < 3 else ("bwd", column - 3)
                for part in (0.5, 1.0, 0.25):  # microbatches: the largest counts
                    amax = seen[step, module, column] * part
                    histories.record(module, direction, at, amax)
        histories.end_step(ProcessGroups.alone())
        history[0] = seen[step]
        amax = history.max(0).values if algorithm == "max" else history[0]
        fp8_max = torch.tensor([448.0] * 3 + [57344.0 if format == "hybrid" else 448.0] * 2)
        want = fp8_max.expand_as(amax) / amax / 2
        if length > 1:
            history = torch.roll(history, -1, 0)
        history[0] = 0
        for module in range(2):
            state = histories.state(module)
            assert torch.equal(torch.cat([state["scale_fwd"], state["scale_bwd"]]), want[module])
            rows = torch.cat([state["amax_history_fwd"], state["amax_history_bwd"]], -1)
            assert torch.equal(rows, history[:, module])
    assert histories.is_fresh == [False, False]


def test_what_no_pass_has_seen_keeps_its_scale() -> None:
    histories = AmaxHistories(1, Fp8Config(fp8_amax_history_len=4, fp8_recipe="delayed"))
    histories.record(0, "fwd", 0, torch.tensor(2.0))
    histories.end_step(ProcessGroups.alone())
    assert histories.scale["fwd"].tolist() == [[224.0, 1.0, 1.0]]


def test_a_state_goes_into_another_and_is_the_same() -> None:
    one, other = (
        AmaxHistories(2, Fp8Config(fp8_amax_history_len=3, fp8_recipe="delayed")) for _ in range(2)
    )
    for step in range(4):
        one.record(1, "fwd", 1, torch.tensor(1.0 + step))
        one.end_step(ProcessGroups.alone())
    other.load(1, one.state(1))
    assert other.is_fresh == [True, False]
    for name, tensor in one.state(1).items():
        assert torch.equal(other.state(1)[name], tensor)


def reduced(rank: int, size: int) -> list[Any]:
    groups = start(tp=2)
    assert (groups.tp.size, groups.replicas.size) == (2, 2)
    histories = AmaxHistories(
        1, Fp8Config(fp8_amax_history_len=4, fp8_recipe="delayed"), groups.device
    )
    histories.record(0, "fwd", 0, torch.tensor(1.0 + rank))
    histories.record(0, "bwd", 0, torch.tensor(8.0 - rank))
    histories.end_step(groups)
    return [histories.scale["fwd"].tolist(), histories.scale["bwd"].tolist()]


def test_all_ranks_of_tp_and_dp_have_the_same_scales() -> None:
    for got in run_world(reduced, 4):
        assert got == [[[112.0, 1.0, 1.0]], [[7168.0, 1.0]]]


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"fp8_recipe": "nvfp4"}, "--fp8-recipe"),
        ({"fp8_format": "e5m2"}, "--fp8-format"),
        ({"fp8_amax_history_len": 0}, "--fp8-amax-history-len"),
        ({"fp8_amax_compute_algo": "mean"}, "--fp8-amax-compute-algo"),
        ({"fp8_margin": 99}, "--fp8-margin"),
        ({"num_layers_at_start_in_bf16": -1}, "--num-layers-at-start-in-bf16"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError) as error:
        Fp8Config(**wrong)
    assert f"{option} is" in error.value.message
