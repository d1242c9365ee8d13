"""Histories with faults, crashes and rivals keep their promises, and planted bugs break them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.simulation.environment import Violation
from tests.support.simulation.kinds import KINDS, PLANTS, make_history
from tests.support.simulation.runs import describe_failure, run_seed

MOST_SEEDS = 1500
"""A planted bug is found within so many seeds."""

LATE = ("old_not_restored", "no_lease", "all_missing_ignored")
"""Bugs that take many seeds to be found."""

CASES = [
    pytest.param(kind, plant, marks=pytest.mark.slow if plant in LATE else ())
    for kind, plants in PLANTS.items()
    for plant in plants
]


def check_seeds(kind: str, seeds: range) -> None:
    for seed in seeds:
        history, error = run_seed(seed, kind, "")
        if error is not None:
            raise AssertionError(describe_failure(seed, kind, "", history, error)) from error


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_hundred_histories(kind: str) -> None:
    check_seeds(kind, range(100))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("store-workers", 100919),  # a publisher that had stalled removed what another published
        ("store-workers", 100519),  # one was stopped between the last object and the trace of it
        ("store-workers", 1391),  # uploads of a publisher that had stalled stayed
        ("store-workers", 102251),  # one published while another read the records
        ("store", 30035),  # a part whose reply was lost was taken for one that was known
        ("workers", 10424),  # the data of workers was gone, and after a crash their records not
        ("store", 12400),  # the upload of a probe stayed beside a complete checkpoint
        ("store-workers", 900931),  # one that joined took back what another had announced
        ("workers", 903810),  # a rename of one that was killed was not flushed by those after it
        ("store-workers", 1719),  # fragments of a worker that had stalled stayed
    ],
)
def test_histories_that_once_failed(kind: str, seed: int) -> None:
    check_seeds(kind, range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_histories(kind: str, part: int) -> None:
    share = 10_000 // len(KINDS) // 10
    check_seeds(kind, range(10_000 + part * share, 10_000 + (part + 1) * share))


@pytest.mark.parametrize(("kind", "plant"), CASES)
def test_a_planted_bug_is_found(kind: str, plant: str) -> None:
    for seed in range(MOST_SEEDS):
        _, error = run_seed(seed, kind, plant)
        if error is not None:
            break
    else:
        pytest.fail(f"{plant} was not found in {MOST_SEEDS} seeds")
    assert isinstance(error, Violation)
    again, same = run_seed(seed, kind, plant)
    assert str(same) == str(error), again.events
    _, none = run_seed(seed, kind, "")
    assert none is None  # it is the bug that was found


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_replays_exactly_in_another_process(kind: str) -> None:
    code = (
        "import sys; from tests.support.simulation.kinds import make_history\n"
        "for seed in range(8):\n"
        "    history = make_history(seed, sys.argv[1]); history.run(); print(history.trace)"
    )
    traces = []
    for seed in range(8):
        history = make_history(seed, kind)
        history.run()
        traces.append(history.trace)
    run = subprocess.run(
        [sys.executable, "-c", code, kind],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == traces, run.stderr
    assert len(set(traces)) == 8


def test_a_failing_seed_is_told_with_its_replay() -> None:
    plant = "files_not_flushed"
    command = [sys.executable, "-m", "tests.support.simulation", "--plant", plant]
    run = subprocess.run(
        [*command, "--seeds", "0:50", "--kind", "staging"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    replay = run.stdout.partition("replay: python ")[2].partition("\n")[0].split()
    again = subprocess.run(
        [sys.executable, *replay], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.partition("\nreplay")[0] == again.stdout.partition("\nreplay")[0]
