"""Schedules against megatron-core's own scheduler, and their edges."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.optim.schedules import LRSchedule

KINDS = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
STYLES = ["linear", "cosine", "exponential", "minus_sqrt"]


def megatron(schedule: LRSchedule, group: dict[str, Any]) -> Any:
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    return core.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=schedule.init_lr,
        max_lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style=schedule.kind,
        start_wd=schedule.start_wd,
        end_wd=schedule.end_wd,
        wd_incr_steps=schedule.wd_incr_steps,
        wd_incr_style=schedule.wd_incr_style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )


@st.composite
def schedules(draw: st.DrawFn) -> LRSchedule:
    decay = draw(st.integers(2, 400))
    low, high = sorted(draw(st.tuples(st.floats(0, 0.01), st.floats(0, 0.01))))
    start_wd, end_wd = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    style = draw(st.sampled_from(["constant", "linear", "cosine"]))
    return LRSchedule(
        kind=draw(st.sampled_from(KINDS)),
        max_lr=high,
        min_lr=low,
        init_lr=draw(st.floats(0, 1)) * high,
        warmup_steps=draw(st.integers(0, decay - 1) | st.floats(0, decay, exclude_max=True)),
        decay_steps=decay,
        wsd_decay_steps=draw(st.integers(1, decay)),
        wsd_decay_style=draw(st.sampled_from(STYLES)),
        start_wd=end_wd if style == "constant" else start_wd,
        end_wd=end_wd,
        wd_incr_style=style,
        wd_incr_steps=draw(st.integers(1, 2 * decay)),
    )


@pytest.mark.peers
@settings(max_examples=200, deadline=None)
@given(schedule=schedules(), increment=st.integers(1, 7))
def test_rates_are_those_of_megatron_core_bit_by_bit(schedule: LRSchedule, increment: int) -> None:
    group = {"wd_mult": 0.5}
    theirs = megatron(schedule, group)
    step = 0
    while step <= schedule.decay_steps + 20:
        assert schedule.lr(step) == group["lr"]
        assert schedule.weight_decay(step) * 0.5 == group["weight_decay"]
        step += increment
        theirs.step(increment)
    assert schedule.state_dict(step) == theirs.state_dict()


@pytest.mark.peers
def test_a_group_has_ends_of_its_own() -> None:
    schedule = LRSchedule(kind="cosine", max_lr=1e-3, warmup_steps=5, decay_steps=50)
    group = {"max_lr": 4e-3, "min_lr": 1e-4}
    theirs = megatron(schedule, group)
    for step in range(60):
        assert schedule.lr(step, max_lr=4e-3, min_lr=1e-4) == group["lr"]
        theirs.step(1)


@pytest.mark.peers
@settings(max_examples=50, deadline=None)
@given(schedule=schedules())
def test_a_saved_state_continues_here_and_there(schedule: LRSchedule) -> None:
    state = schedule.state_dict(7)
    group: dict[str, Any] = {}
    theirs = megatron(schedule, group)
    theirs.load_state_dict(state)
    assert group["lr"] == schedule.lr(7)


def test_the_half_way_of_a_cosine() -> None:
    schedule = LRSchedule(kind="cosine", max_lr=2.0, min_lr=1.0, decay_steps=100)
    assert math.isclose(schedule.lr(50), 1.5)
    assert schedule.lr(101) == 1.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "cosin"}, "cosin"),
        ({"min_lr": 1.0}, "min-lr"),
        ({"init_lr": 1.0}, "warmup-init"),
        ({"warmup_steps": 5, "decay_steps": 5}, "warm-up of 5 steps"),
        ({"kind": "WSD", "decay_steps": 5}, "lr-wsd-decay-iters"),
        ({"start_wd": 0.5, "end_wd": 0.1}, "start-weight-decay"),
        ({"start_wd": 0.0, "end_wd": 0.1}, "incr-style"),
        ({"warmup_steps": -1}, "-1 warm-up"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LRSchedule(**values)
