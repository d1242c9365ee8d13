"""Writing faults W1-W6 for training states, in buckets and files per rank: nothing is half done.

As in `test_writing`, but for jobs whose destination repeats tensors on several ranks, whose
optimizer state goes through another space, and whose source is decoded from buckets.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.options.layout import ParallelConfig
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.checkpoints.trained import config, write
from tests.support.folders import contents, file_states
from tests.support.runs.interrupted_runs import Job, strike

MODEL = {"num_layers": 2, "tied_embeddings": True, "vocab_size": 5}
SCENARIOS: dict[str, dict[str, Any]] = {
    "to buckets": {"optimizer_format": "dp_reshardable", "tp": 2},
    "to ranks": {"to": "megatron", "tp": 2, "pp": 2},
    "buckets to tensors": {"optimizer_format": "fully_reshardable", "pp": 2},
    "buckets to buckets": {"optimizer_format": "dp_reshardable", "pp": 2, "dp": 2, "digest": "all"},
    "ranks to buckets": {"to": "torch_dist", "optimizer_format": "dp_reshardable", "tp": 1},
}


def make(root: Path, scenario: str, materialize: Any) -> Job:
    first = root / "first"
    write(first, config(**MODEL), ParallelConfig(), materialize)
    if scenario.startswith("buckets"):
        reshard(first, root / "source", optimizer_format="dp_reshardable", tp=2, fsync=False)
    elif scenario.startswith("ranks"):
        reshard(first, root / "source", to="megatron", tp=2, fsync=False)
    else:
        first.rename(root / "source")
    Files().remove(first)
    options = {"threads": 1, **SCENARIOS[scenario]}
    job = Job(root=root, options=options, expected={}, source=file_states(root / "source"))
    job.run()
    expected = contents(job.out)
    assert expected
    assert verify(root / "source", job.out).exit_status == 0
    Files().remove(job.out)
    return Job(root=root, options=options, expected=expected, source=job.source)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("fault", ["kill", "torn", errno.ENOSPC, "short"])
def test_a_fault_at_calls_all_along(
    tmp_path: Path, materialize: Any, scenario: str, fault: int | str
) -> None:
    job = make(tmp_path, scenario, materialize)
    strike(job, fault, old=False, every=131)


@pytest.mark.parametrize("scenario", ["to buckets", "to ranks"])
def test_the_old_state_is_valid_until_the_new_one_is(
    tmp_path: Path, materialize: Any, scenario: str
) -> None:
    strike(make(tmp_path, scenario, materialize), "kill", old=True, every=83)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["to buckets", "to ranks"])
@pytest.mark.parametrize("fault", ["kill", errno.EIO])
def test_a_fault_at_every_call(
    tmp_path: Path, materialize: Any, scenario: str, fault: int | str
) -> None:
    strike(make(tmp_path, scenario, materialize), fault, old=False, every=3)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_run_after_run_is_killed(tmp_path: Path, materialize: Any, scenario: str) -> None:
    job = make(tmp_path, scenario, materialize)
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    for share in (0.4, 0.6, 0.5, 0.8, 0.7):
        with pytest.raises(Killed):
            job.run(FaultyFiles(int(len(calm.calls) * share), "torn"))
        assert not job.out.exists()
    assert job.run().resumed_units > 0
    job.check_end()


@pytest.mark.parametrize("scenario", ["to buckets", "buckets to tensors"])
def test_another_optimizer_format_does_not_resume(
    tmp_path: Path, materialize: Any, scenario: str
) -> None:
    job = make(tmp_path, scenario, materialize)
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    with pytest.raises(Killed):
        job.run(FaultyFiles(len(calm.calls) - 30, "kill"))
    other = "fully_reshardable" if scenario == "to buckets" else "dp_reshardable"
    options = {**job.options, "optimizer_format": other}
    report = reshard(tmp_path / "source", job.out, **options)
    assert report.resumed_units == 0
    assert verify(tmp_path / "source", job.out).exit_status == 0
    assert file_states(tmp_path / "source") == job.source
