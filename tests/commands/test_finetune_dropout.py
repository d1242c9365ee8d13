"""Finetune with dropout: curves that go on to the last bit, and what checkpoints say of it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import verify
from megtool.errors import UsageError
from megtool.train.run_log import read_log
from tests.support.runs.finetune_runs import curve, interrupt_and_resume
from tests.support.runs.finetune_runs import tune as any_run
from tests.support.worlds.gloo_world import run_world

BOTH = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
SHORT = {"exit_duration_in_mins": 1e-9}
"""Ends a run after its first step."""

tune = partial(any_run, train_iters=3, global_batch_size=4)


def args_of(folder: Path, iteration: int) -> Any:
    path = folder / f"iter_{iteration:07d}" / "common.pt"
    return torch.load(path, weights_only=False)["args"]


@pytest.mark.parametrize("more", [{}, {"lora_rank": 2, "lora_dropout": 0.1}], ids=["all", "lora"])
def test_an_ended_run_goes_on_to_the_last_bit(more, model, data, tmp_path) -> None:
    how = BOTH | {"eval_split": 0.2, "micro_batch_size": 2} | more
    tune(model, tmp_path / "ref", data, **how)
    assert tune(model, tmp_path / "out", data, **how, **SHORT).outcome.iteration == 1
    assert tune(model, tmp_path / "out", data, **how).start_iteration == 1
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")


def test_dropout_changes_learning_and_no_evaluation(model, data, tmp_path) -> None:
    """The evaluation before the first step knows nothing of dropout."""
    how: dict[str, dict[str, Any]] = {"none": {}, "zero": dict.fromkeys(BOTH, 0.0), "some": BOTH}
    for name, more in how.items():
        tune(model, tmp_path / name, data, eval_split=0.2, train_iters=2, **more)
    assert curve(tmp_path / "zero") == curve(tmp_path / "none")
    none, some = (read_log(tmp_path / name / "log.jsonl") for name in ("none", "some"))
    assert none[0]["eval_loss"] == some[0]["eval_loss"]
    assert none[1]["loss"] != some[1]["loss"]
    for name, share in (("none", 0.0), ("some", 0.1)):
        assert args_of(tmp_path / name, 2).hidden_dropout == share
        assert args_of(tmp_path / name, 2).attention_dropout == 2 * share


def test_recompute_changes_nothing(model, data, tmp_path) -> None:
    for name in ("none", "full", "selective"):
        more = {} if name == "none" else {"recompute_granularity": name}
        tune(model, tmp_path / name, data, train_iters=2, **BOTH, **more)
    for name in ("full", "selective"):
        assert curve(tmp_path / name) == curve(tmp_path / "none")


def test_shares_are_checked_and_a_change_is_told(model, data, tmp_path, caplog) -> None:
    for name in BOTH:
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is 1.0"):
            tune(model, tmp_path / "out", data, **{name: 1.0})
    tune(model, tmp_path / "out", data, **SHORT)
    with caplog.at_level(logging.WARNING):
        tune(model, tmp_path / "out", data, **BOTH, **SHORT)
    assert "hidden_dropout" in caplog.text.replace("-", "_")


def on_rank(rank: int, size: int, model: str, data: str, folder: str, how: dict[str, Any]) -> None:
    tune(model, folder, data, **how)


@pytest.mark.slow
def test_tensor_parallel_ranks_learn_as_one_process(model, data, tmp_path) -> None:
    """Hidden dropout alone: heads are cut, and their weights fall by rank."""
    how = {"hidden_dropout": 0.2, "train_iters": 2}
    tune(model, tmp_path / "one", data, **how)
    run_world(on_rank, 2, str(model), str(data), str(tmp_path / "two"), how | {"tp": 2})
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}, {"cp": 2}], ids=str
)
def test_ended_runs_of_ranks_go_on_to_the_last_bit(layout, model, data, tmp_path) -> None:
    how = BOTH | layout
    for name, ends in (("ref", {}), ("out", SHORT), ("out", {})):
        run_world(on_rank, 2, str(model), str(data), str(tmp_path / name), how | ends)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")


@pytest.mark.slow
def test_killed_it_goes_on_with_the_identical_curve(model, data, tmp_path) -> None:
    options = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    interrupt_and_resume(model, data, tmp_path, options, steps=30, lines=13)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0
