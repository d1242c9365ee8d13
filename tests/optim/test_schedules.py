"""Schedules against megatron-core's own scheduler, and their edges."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig
from megtool.optim.schedules import LRSchedule

KINDS = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
STYLES = ["linear", "cosine", "exponential", "minus_sqrt"]


def megatron(schedule: LRSchedule, group: dict[str, Any]) -> Any:
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    options = schedule.options
    return core.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.wd_incr_steps,
        wd_incr_style=options.weight_decay_incr_style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


@st.composite
def schedules(draw: st.DrawFn) -> LRSchedule:
    decay = draw(st.integers(2, 400))
    low, high = sorted(draw(st.tuples(st.floats(0, 0.01), st.floats(0, 0.01))))
    start_wd, end_wd = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    style = draw(st.sampled_from(["constant", "linear", "cosine"]))
    is_share = draw(st.booleans())
    options = OptimizerConfig(
        lr=high,
        min_lr=low,
        lr_decay_style=draw(st.sampled_from(KINDS)),
        lr_decay_iters=decay,
        lr_warmup_init=draw(st.floats(0, 1)) * high,
        lr_warmup_iters=None if is_share else draw(st.integers(0, decay - 1)),
        lr_warmup_fraction=draw(st.floats(0, 0.999)) if is_share else None,
        lr_wsd_decay_iters=draw(st.integers(1, decay)),
        lr_wsd_decay_style=draw(st.sampled_from(STYLES)),
        start_weight_decay=end_wd if style == "constant" else start_wd,
        end_weight_decay=end_wd,
        weight_decay_incr_style=style,
    )
    return LRSchedule(
        options=options,
        train_iters=draw(st.integers(1, 2 * decay)),
        global_batch_size=draw(st.sampled_from([1, 3])),
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
@settings(max_examples=50, deadline=None)
@given(schedule=schedules())
def test_a_saved_state_continues_here_and_there(schedule: LRSchedule) -> None:
    state = schedule.state_dict(7)
    group: dict[str, Any] = {}
    theirs = megatron(schedule, group)
    theirs.load_state_dict(state)
    assert group["lr"] == schedule.lr(7)


def test_the_half_way_of_a_cosine() -> None:
    options = OptimizerConfig(lr_decay_style="cosine", lr=2.0, min_lr=1.0)
    schedule = LRSchedule(options=options, train_iters=100)
    assert math.isclose(schedule.lr(50), 1.5)
    assert schedule.lr(101) == 1.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr_decay_style": "cosin"}, "cosin"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "5 warm-up steps"),
        ({"lr_decay_style": "WSD"}, "lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6}, "lr-wsd-decay-iters"),
        ({"start_weight_decay": 0.5, "end_weight_decay": 0.1}, "start-weight-decay"),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.1}, "incr-style"),
        ({"lr_warmup_iters": -1}, "lr-warmup-iters is -1"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LRSchedule(options=OptimizerConfig(**values), train_iters=5)
