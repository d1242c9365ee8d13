"""Profiles hold the steps that were named, with the parts of a step by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from megtool.errors import UsageError
from megtool.train.options.profile import ProfileOptions
from megtool.train.profile import StepProfiler
from tests.support.errors import raises

CPU = torch.device("cpu")
SECOND = ProfileOptions(profile="torch", profile_step_start=1, profile_step_end=2)


def run_steps(options: ProfileOptions, folder: Path, rank: int = 0, num_steps: int = 4) -> None:
    with StepProfiler(options, folder, rank, CPU) as profiler:
        for iteration in range(num_steps):
            profiler.begin(iteration)
            with record_function(f"step {iteration + 1}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.end(iteration + 1)


def test_the_trace_holds_the_steps_that_were_named(tmp_path: Path) -> None:
    run_steps(SECOND, tmp_path)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank-0-steps-2-2.json.gz", "rank-0-steps-2-2.txt"]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / names[0]).read_bytes()))
    events = {event.get("name") for event in trace["traceEvents"]}
    assert "step 2" in events
    assert not events & {"step 1", "step 3", "step 4"}
    assert "aten::mm" in (tmp_path / "profile" / names[1]).read_text()


@pytest.mark.parametrize(("options", "rank"), [(ProfileOptions(), 0), (SECOND, 1)])
def test_other_ranks_and_runs_are_left_alone(
    options: ProfileOptions, rank: int, tmp_path: Path
) -> None:
    run_steps(options, tmp_path, rank)
    assert not list(tmp_path.iterdir())


def test_a_run_that_stops_inside_leaves_no_profiler_running(tmp_path: Path) -> None:
    run_steps(ProfileOptions(profile="torch", profile_step_start=1), tmp_path, num_steps=3)
    assert not list(tmp_path.iterdir())
    run_steps(SECOND, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile_step_start": 4, "profile_step_end": 4}, "is not below"),
        ({"profile_step_end": 12}, "steps 11 to 12, and this run does steps 3 to 11"),
        ({"profile_step_start": 1, "profile_step_end": 4}, "steps 2 to 4"),
        ({"profile_step_start": 4, "profile_step_end": 5, "profile_ranks": "0,2"}, "names 2"),
        ({"profile_step_start": 4, "profile_step_end": 5, "profile_ranks": "a"}, "is 'a'"),
    ],
)
def test_steps_and_ranks_that_a_run_lacks_are_refused(options: dict, words: str) -> None:
    with raises(UsageError, words):
        ProfileOptions(profile="torch", **options).check_profile(2, 11, 2)


def test_nsight_needs_cuda(tmp_path: Path) -> None:
    with raises(UsageError, "--profile nsys is for CUDA"):
        StepProfiler(ProfileOptions(profile="nsys"), tmp_path, 0, CPU)
