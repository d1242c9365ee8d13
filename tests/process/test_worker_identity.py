"""Which worker a process is: options, the variables of launchers, and their contradictions."""

from __future__ import annotations

import pytest

from megtool.errors import UsageError
from megtool.process.worker_identity import WorkerIdentity, find_worker, parse_worker
from tests.support.errors import raises

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "7"}


def place(identity: WorkerIdentity | None) -> tuple[int, int] | None:
    return None if identity is None else (identity.index, identity.count)


@pytest.mark.parametrize(
    ("text", "expected"), [("0/4", (0, 4)), ("3/4", (3, 4)), ("0/1", None), (None, None)]
)
def test_an_option_names_a_worker(text: str | None, expected: tuple[int, int] | None) -> None:
    assert place(parse_worker(text, TORCHRUN)) == expected


@pytest.mark.parametrize("text", ["", "4/4", "-1/4", "1", "1/0", "a/b", "1/4/2", "٣/4", "1 /4"])
def test_what_names_no_worker_is_refused(text: str) -> None:
    with raises(UsageError, id="usage") as caught:
        parse_worker(text, {})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, (5, 8)),
        (STEP, (2, 4)),
        (OPEN_MPI, (0, 3)),
        (MPICH, (2, 3)),
        ({"JOB_COMPLETION_INDEX": "3", "MEGTOOL_WORKERS": "9"}, (3, 9)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_launchers_tell_which_worker_this_is(
    environment: dict[str, str], expected: tuple[int, int] | None
) -> None:
    assert place(parse_worker("auto", environment)) == expected
    assert parse_worker(None, environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # a batch script
        ARRAY,
        {"JOB_COMPLETION_INDEX": "3"},
        {"MEGTOOL_WORKERS": "9"},
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_a_process_of_its_own_does_everything(environment: dict[str, str]) -> None:
    assert parse_worker("auto", environment) is None


def test_the_innermost_launcher_decides() -> None:
    assert place(find_worker(STEP | TORCHRUN)) == (5, 8)
    assert place(find_worker(STEP | OPEN_MPI)) == (0, 3)
    assert place(find_worker(STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"})) == (2, 4)
    assert place(find_worker(STEP | {"RANK": "1", "WORLD_SIZE": "4"})) == (1, 4)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "two", "WORLD_SIZE": "4"},
        {"RANK": "4", "WORLD_SIZE": "4"},
        {"RANK": "-1", "WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "0"},
    ],
)
def test_contradictions_are_refused(environment: dict[str, str]) -> None:
    with raises(UsageError, id="usage") as caught:
        parse_worker("auto", environment)
    assert caught.value.hint


def test_a_job_array_is_a_run_of_workers_where_it_is_named() -> None:
    assert place(parse_worker("slurm-array", ARRAY)) == (2, 4)
    assert place(parse_worker("slurm-array", ARRAY | STEP)) == (2 * 4 + 2, 16)
    assert place(parse_worker("0/2", ARRAY)) == (0, 2)
    with raises(UsageError, id="usage"):
        parse_worker("slurm-array", {})
    for changed in ({"ID": "4"}, {"COUNT": "3"}, {"MIN": "0"}, {"ID": "9"}):
        broken = ARRAY | {f"SLURM_ARRAY_TASK_{k}": v for k, v in changed.items()}
        with raises(UsageError, id="usage"):
            parse_worker("slurm-array", broken)
