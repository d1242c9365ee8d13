"""Runs of several workers: one after another in this process, or each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import megtool
from megtool.plan import work_units
from tests.support.paths import ROOT

UNIT_BYTES = 3000
"""A unit in these runs: small models have many."""


def run_workers(
    verb: str, source: Path, out: Path, count: int, order: Iterable[int] = (), **options: Any
) -> list[Any]:
    """The reports of all workers, one after another in this order."""
    function = getattr(megtool, verb)
    return [function(source, out, worker=f"{n}/{count}", **options) for n in order or range(count)]


def start_worker(source: Path, out: Path, worker: str, **options: Any) -> subprocess.Popen[str]:
    """A worker of a reshard in a process of its own, which prints its report as JSON."""
    call = {"source": str(source), "destination": str(out), "worker": worker, **options}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.runs.worker_runs", json.dumps(call)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def state_of(run: subprocess.Popen[str]) -> str:
    """Wait for a worker to end well, and say how its part in the run ended."""
    stdout, stderr = run.communicate(timeout=120)
    assert run.returncode == 0, stderr
    state: str = json.loads(stdout)["worker"]["state"]
    return state


def main() -> None:
    """Do what the command line says."""
    work_units.UNIT_BYTES = UNIT_BYTES
    report = megtool.reshard(**json.loads(sys.argv[1]))
    print(json.dumps(report.to_json()))


if __name__ == "__main__":
    main()
