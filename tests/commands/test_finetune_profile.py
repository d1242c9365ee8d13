"""A run measures itself: operations, memory, and a profile of some steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import megtool
from megtool.errors import UsageError
from megtool.model.stacks.flops import training_flops
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.runs.finetune_runs import curve, tune


def test_a_profiled_run_trains_as_any_other(model: Path, data: Path, tmp_path: Path) -> None:
    tune(model, tmp_path / "plain", data, train_iters=3)
    tune(
        model,
        *(tmp_path / "out", data),
        **{"train_iters": 3, "profile": "torch", "profile_step_start": 1, "profile_step_end": 2},
    )
    assert curve(tmp_path / "out") == curve(tmp_path / "plain")
    (trace,) = (tmp_path / "out/profile").glob("*.json.gz")
    events = {e.get("name") for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"data", "forward and backward", "reduce gradients", "optimizer"} <= events


def test_the_log_has_operations_and_memory(model: Path, data: Path, tmp_path: Path) -> None:
    tune(model, tmp_path / "out", data, train_iters=2, seq_length=16, global_batch_size=4)
    steps = [line for line in read_log(tmp_path / "out/log.jsonl") if "loss" in line]
    config = megtool.open(model).config
    assert config is not None
    flops = training_flops(config, 16)
    assert flops is not None
    for step in steps:
        assert abs(step["tflops"] * 1e12 * step["seconds"] - 4 * flops) <= 1e6 + 1e-3 * flops
        assert step["peak_memory_bytes"] > 50 << 20


def test_steps_that_the_run_does_not_do(model: Path, data: Path, tmp_path: Path) -> None:
    with raises(UsageError, "--profile is for steps 11 to 12, and this run does steps 1 to 2"):
        tune(model, tmp_path / "out", data, train_iters=2, profile="torch")
    assert not list(tmp_path.rglob("iter_*"))
