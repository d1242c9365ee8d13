"""Plan of a run: its rates, as Megatron has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig
from megtool.options.config_file import build_options
from megtool.train.options.config import TrainConfig
from megtool.train.run_plan import RunPlan, saves_in_background

BATCH, ITERS = 4, 25


def plan() -> RunPlan:
    return RunPlan(
        train_iters=ITERS,
        seq_length=8,
        micro_batch_size=1,
        global_batch_size=BATCH,
        replicas=1,
    )


@pytest.mark.peers
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3, 1 / 3])
def test_a_share_of_warm_up_is_not_rounded_as_it_is_not_in_megatron(fraction: float) -> None:
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    options = OptimizerConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_fraction=fraction)
    group: dict[str, Any] = {}
    # As Megatron-LM's `get_optimizer_param_scheduler` makes it of its arguments.
    theirs = core.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=0.0,
        lr_warmup_steps=fraction * (ITERS * BATCH),
        lr_decay_steps=ITERS * BATCH,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=ITERS * BATCH,
        wd_incr_style="constant",
    )
    schedule = plan().make_lr_schedule(options)
    for step in range(0, (ITERS + 1) * BATCH, BATCH):
        assert schedule.lr(step) == group["lr"], step
        theirs.step(BATCH)
    assert schedule.state_dict(0)["lr_warmup_steps"] == theirs.state_dict()["lr_warmup_steps"]


def test_a_warm_up_that_is_all_is_refused() -> None:
    with pytest.raises(UsageError, match="25 warm-up steps"):
        plan().make_lr_schedule(OptimizerConfig(lr=1e-2, lr_warmup_fraction=1.0))


@pytest.mark.parametrize(
    ("interval", "iteration", "is_saved"),
    [(None, 0, False), (10, 0, True), (10, 20, False), (25, 0, False), (30, 0, False)],
)
def test_only_saves_before_the_last_are_made_in_the_background(
    interval: int | None, iteration: int, is_saved: bool
) -> None:
    settings = build_options(TrainConfig, {"save_interval": interval})
    assert saves_in_background(settings, plan(), iteration) is is_saved
    waiting = build_options(TrainConfig, {"save_interval": interval, "async_save": False})
    assert not saves_in_background(waiting, plan(), iteration)
