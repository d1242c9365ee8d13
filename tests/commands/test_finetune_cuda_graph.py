"""Finetune with CUDA graphs: the curve of a run without, broken off and gone on with or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import finetune, verify
from megtool.errors import UsageError
from tests.support.runs.finetune_runs import curve, tune


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_cpu_has_no_graphs(dry_run: bool, model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it needs a CUDA device"):
        finetune(
            model,
            tmp_path / "out",
            data=[str(data)],
            device="cpu",
            cuda_graph_impl="local",
            dry_run=dry_run,
        )
    assert not (tmp_path / "out").exists()


class BrokenOff(BaseException):
    """What ends a run in the middle of it."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("how", "goes_on"),
    [
        ({}, "local"),
        ({}, "none"),
        ({"fp16": True}, "local"),
        ({"recompute_granularity": "full", "fp8_recipe": "delayed"}, "local"),
    ],
    ids=["bf16", "goes on without", "fp16", "FP8, computed again"],
)
def test_a_run_that_is_broken_off_has_the_same_curve(
    how: dict[str, Any],
    goes_on: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    how = how | {"eval_split": 0.1, "eval_interval": 2, "save_interval": 2, "global_batch_size": 4}
    how |= {"device": "cuda", "async_save": False}
    tune(model, tmp_path / "plain", data, **how)
    caplog.set_level("INFO", "megtool.train.cuda_graph")
    tune(model, tmp_path / "whole", data, cuda_graph_impl="local", **how)
    assert "run as a CUDA graph" in caplog.text
    assert curve(tmp_path / "whole") == curve(tmp_path / "plain")
    steps: list[int] = []

    def watch(phase: str, done: int, total: int) -> None:
        steps.append(done) if phase == "train" else None
        if len(steps) == 6:  # the first says where it begins
            raise BrokenOff

    with pytest.raises(BrokenOff):
        tune(model, tmp_path / "out", data, cuda_graph_impl="local", progress=watch, **how)
    report = tune(model, tmp_path / "out", data, cuda_graph_impl=goes_on, **how)
    assert report.start_iteration == 4
    assert curve(tmp_path / "out") == curve(tmp_path / "plain")
    assert verify(tmp_path / "out", tmp_path / "plain").exit_status == 0  # moments too
