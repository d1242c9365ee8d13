"""Race: jobs in fresh processes, each between two runs of `cp` on the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOB = Path(__file__).resolve().parent / "job.py"
SAMPLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one process did: seconds of its job, of the whole process, and bytes it moved.

    `memory` is RssAnon over time as `(monotonic seconds, bytes)`, `shared` RssShmem; both are empty
    if nobody watched.
    """

    seconds: float
    process_seconds: float
    moved_bytes: int
    facts: Mapping[str, Any]
    phases: Mapping[str, Mapping[str, float]]
    memory: Sequence[tuple[float, int]] = ()
    shared: Sequence[tuple[float, int]] = ()

    def peak_bytes(self, phase: str | None = None) -> int:
        """The largest RssAnon seen, in the whole process or during one phase."""
        span = self.phases[phase] if phase else {"began": 0.0, "ended": float("inf")}
        inside = [n for at, n in self.memory if span["began"] <= at <= span["ended"]]
        return max(inside, default=0)

    def peak_of_both(self) -> tuple[int, int]:
        """Anonymous and shared memory when their sum was largest."""
        pairs = [(a, b) for (_, a), (_, b) in zip(self.memory, self.shared, strict=True)]
        return max(pairs, key=sum, default=(0, 0))


def run_job(
    kind: str, options: Mapping[str, Any], *, watch: bool = False, tree: Path | None = None
) -> Run:
    """Run one job of `job.py` in a fresh process, by the megtool of another checkout if asked.

    Raises:
        RuntimeError: it failed; with what it wrote to stderr.
    """
    command = [sys.executable, str(JOB), kind, json.dumps(options)]
    began = time.perf_counter()
    # Byte code is kept, as that of an installed package is.
    keeping = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if tree is not None:
        keeping["PYTHONPATH"] = str(tree)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=keeping
    ) as process:
        memory: list[tuple[float, int, int]] = []
        watcher = threading.Thread(target=_watch, args=(process.pid, memory), daemon=True)
        if watch:
            watcher.start()
        out, err = process.communicate()
        if watch:
            watcher.join()
    ended = time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"the job {kind} {dict(options)} failed:\n{err}")
    seen = json.loads(out.splitlines()[-1])
    job = list(seen["phases"].values())
    return Run(
        seconds=sum(p["ended"] - p["began"] for p in job),
        process_seconds=ended - began,
        moved_bytes=int(sum(p["read"] + p["written"] for p in job)),
        facts=seen["facts"],
        phases=seen["phases"],
        memory=[(at, anonymous) for at, anonymous, _ in memory],
        shared=[(at, shared) for at, _, shared in memory],
    )


def _watch(pid: int, memory: list[tuple[float, int, int]]) -> None:
    """Sample the anonymous and the shared memory of a process until it ends."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
            while True:
                status.seek(0)
                text = status.read(4096)
                at = text.find(b"RssAnon:")
                if at < 0:  # a process that ended has no memory left to tell of
                    return
                shared = text.find(b"RssShmem:")
                held = [int(text[i:].split(None, 2)[1]) << 10 for i in (at, shared)]
                memory.append((time.monotonic(), held[0], held[1]))
                time.sleep(SAMPLE_SECONDS)
    except (FileNotFoundError, ProcessLookupError):
        return


def copy_seconds(source: Path, target: Path, *, fsync: bool) -> float:
    """Seconds of `cp -r --reflink=never`, and of an fsync of every file and folder if asked."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    if fsync:
        for folder, _, names in os.walk(target):
            for path in [*(os.path.join(folder, n) for n in names), folder]:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
    return time.perf_counter() - began


def free_space(folder: Path) -> int:
    """Bytes free once the file system is done with what was removed, which XFS does late."""
    seen: list[int] = []
    while len(seen) < 20 and seen[-2:] != [free := shutil.disk_usage(folder).free] * 2:
        seen.append(free)
        os.sync()
        time.sleep(0.1)
    return seen[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A job that races: `options` lack only the destination. `ideal_bytes` is what it must move."""

    name: str
    kind: str = "reshard"
    options: Mapping[str, Any]
    ideal_bytes: int
    limit: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Result:
    """All times of one entrant, of the two copies around each, and of all copies of the race.

    `new_space` is what the file system has less after the watched run, if asked.
    """

    entrant: Entrant
    seconds: list[float] = field(default_factory=list)
    process_seconds: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    watched: Run | None = None
    new_space: int = 0

    @property
    def pairs(self) -> list[float]:
        """Times as multiples of the mean of the copies just before and just after."""
        rows = zip(self.seconds, self.before, self.after, strict=True)
        return [2 * s / (a + b) for s, a, b in rows]

    @property
    def copy_least(self) -> float:
        """The fastest copy of the whole race: those around one entrant may all be slow ones."""
        return min(self.copies)

    @property
    def least(self) -> float:
        """The fastest run over the fastest copy."""
        return min(self.seconds) / self.copy_least

    @property
    def median(self) -> float:
        """The median of the pairs."""
        return statistics.median(self.pairs)

    @property
    def peak_bytes(self) -> int:
        """The most anonymous memory of the watched run; 0 where nobody watched."""
        return self.watched.peak_bytes() if self.watched else 0

    @property
    def figures(self) -> dict[str, Any]:
        """What a table's JSON keeps of it."""
        return {
            "job": self.entrant.name,
            "least": self.least,
            "median": self.median,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "copies": self.copies,
        }

    @property
    def amplification(self) -> float:
        """Bytes read and written over the bytes that had to be."""
        return self.watched.moved_bytes / self.entrant.ideal_bytes if self.watched else float("nan")


def race(
    entrants: Sequence[Entrant],
    source: Path,
    scratch: Path,
    *,
    rounds: int,
    fsync: bool,
    space: bool = False,
) -> list[Result]:
    """Run all entrants `rounds` times, with a copy of `source` between any two.

    Results are removed, and the disk left in peace, before anything is timed. One more run of each,
    not timed, is watched for memory and bytes; with `space` also for the space it takes, which only
    a file system that nobody else writes to can tell.
    """
    copies: list[float] = []
    results = [Result(entrant=e, copies=copies) for e in entrants]

    def clear() -> Path:
        place = scratch / "out"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        os.sync()
        return place

    def copy() -> float:
        copies.append(copy_seconds(source, clear(), fsync=fsync))
        return copies[-1]

    def options(entrant: Entrant) -> dict[str, Any]:
        return {"source": str(source), "destination": str(clear()), **entrant.options}

    copy()  # the first touches pages the machine may have to find
    copies.clear()
    for _ in range(rounds):
        last = copy()
        for result in results:
            run = run_job(result.entrant.kind, options(result.entrant))
            result.seconds.append(run.seconds)
            result.process_seconds.append(run.process_seconds)
            result.before.append(last)
            last = copy()
            result.after.append(last)
    for result in results:
        entrant = result.entrant
        job = options(entrant)
        free = free_space(scratch) if space else 0
        result.watched = run_job(entrant.kind, job, watch=True)
        result.new_space = free - free_space(scratch) if space else 0
    clear()
    return results
