"""Histories of several workers that write one checkpoint, to a file system or to a store."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megtool.errors import MegtoolError
from megtool.options.execution import ExecutionOptions
from megtool.plan.execute import CopyReport
from megtool.process.worker_identity import WorkerIdentity
from megtool.reshard.staged_write import make_stage, write_staged
from megtool.storage.location.path import location
from tests.support.simulation.environment import Violation
from tests.support.simulation.history import describe
from tests.support.simulation.local_files import LocalFaults, SimulatedFiles
from tests.support.simulation.object_store import URL, StoreFaults
from tests.support.simulation.plans import HOME, CurrentDisk, TinyPlan
from tests.support.simulation.scheduler import Killed, Process
from tests.support.simulation.staging_history import StagingHistory
from tests.support.simulation.store_history import EXPIRED_S, StoreHistory, in_store

MOST_ROUNDS = 6
LATE = "published"
"""What stays of a committed run, for workers that are started later."""


def run_worker(
    tiny: TinyPlan, files: SimulatedFiles, out: Path, worker: WorkerIdentity, *, overwrite: bool
) -> CopyReport:
    """Execute the share of a worker, and publish if it is the last."""
    options = ExecutionOptions(
        threads=1,
        memory="1MiB",
        digest=tiny.digest,
        overwrite=overwrite,
        worker=f"{worker.index}/{worker.count}",
    )
    plan = tiny.share(worker)
    stage = make_stage(
        options,
        out,
        files=files,
        fingerprint=plan.fingerprint,
        is_file=tiny.is_file,
        sources=[Path(HOME) / f"source{tiny.number}"],
        plan=plan,
    )
    finish: Any = (lambda copied: None) if tiny.is_file else None
    return write_staged(
        plan, stage, options, verb="reshard", progress=lambda *_: None, finish=finish
    )


class LocalWorkersHistory(StagingHistory):
    """Workers on one file system; a machine that crashes takes all of them along."""

    kind = "workers"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.disk.locks = True
        self.count = self.rng.choice((2, 2, 3, 4))
        self.scheduler.switches = self.rng.choice((0.05, 0.3))

    def work(self, process: Process, number: int) -> CopyReport:
        """One worker."""
        files = SimulatedFiles(self.disk, process, process.memory["faults"])
        worker = WorkerIdentity(number, self.count)
        return run_worker(self.plan, files, Path(f"{HOME}/out"), worker, overwrite=self.overwrite)

    def start(self, number: int, *, is_last: bool) -> Process:
        """A worker, and what will happen to it."""
        rng, calls = self.rng, self.plan.calls
        process = self.scheduler.process(functools.partial(self.work, number=number))
        process.slowness = rng.choice((1.0, 1.0, 10.0))
        process.memory["faults"] = faults = LocalFaults(rng)
        kind = "" if is_last else rng.choice(("dies", "dies", "errno", "short", ""))
        if kind == "dies":
            process.dies_at = rng.randint(1, calls)
        elif kind == "errno":
            faults.at = rng.randint(1, calls)
        elif kind == "short":
            faults.short = 0.3
        return process

    def crash_all(self) -> None:
        """The machine loses power now and then."""
        if self.rng.random() < 0.3:
            self.crash()

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: something that must hold does not.
        """
        CurrentDisk.disk = self.disk
        with self.environment():
            run_rounds(self)

    def environment(self) -> Any:
        """What surrounds a run."""
        from tests.support.simulation.environment import simulated

        return simulated(self.scheduler)

    def current(self) -> Any:
        """What is at the destination."""
        return self.disk.tree(f"{HOME}/out")

    def left_over(self) -> list[str]:
        """What is beside the destination, except for the trace of a committed run."""
        names = [n for n in self.disk.find(HOME).names if not n.startswith("source")]
        trace = list(self.disk.tree(f"{HOME}/.out.megtool") or {})
        known = {"out"} | ({".out.megtool"} if trace == [LATE] else set())
        return sorted(set(names) - known)


class StoreWorkersHistory(StoreHistory):
    """Workers that write to one store."""

    kind = "store-workers"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.count = self.rng.choice((2, 2, 3, 4))
        self.scheduler.switches = self.rng.choice((0.05, 0.3))

    def work(self, process: Process, number: int) -> CopyReport:
        """One worker."""
        files = SimulatedFiles(self.disk, process, LocalFaults(self.rng))
        worker = WorkerIdentity(number, self.count)
        out = location(f"{URL}/run/out")
        return run_worker(self.plan, files, out, worker, overwrite=self.overwrite)

    def start(self, number: int, *, is_last: bool) -> Process:
        """A worker, and what will happen to it."""
        rng = self.rng
        process = self.scheduler.process(functools.partial(self.work, number=number))
        process.slowness = rng.choice((1.0, 1.0, 10.0))
        faults = StoreFaults(rng)
        if not is_last:
            _, faults, process.dies_at, process.stalls_at = self.draw_run(self.plan)
        self.store.faults[process] = faults
        return process

    def crash_all(self) -> None:
        """Leases of the dead expire now and then."""
        if self.rng.random() < 0.5:
            self.scheduler.seconds += EXPIRED_S

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: something that must hold does not.
        """
        CurrentDisk.disk = self.disk
        with in_store(self.scheduler, self.store):
            run_rounds(self)

    def current(self) -> Any:
        """What is at the destination."""
        return self.tree()

    def left_over(self) -> list[str]:
        """What is beside the destination, except for the trace of a committed run."""
        notes = [k for k in self.store.objects() if ".megtool/" in k]
        uploads = [key for key in self.store.open_uploads if "/probe-" not in key]  # without parts
        return [k for k in notes if not k.endswith(f"/{LATE}")] + uploads


def run_rounds(history: LocalWorkersHistory | StoreWorkersHistory) -> None:
    """Start workers, some of which die, until one has published; then start all again.

    Raises:
        Violation: something that must hold does not.
    """
    history.running = [history.plan]
    published = 0
    for number in range(MOST_ROUNDS):
        is_last = number == MOST_ROUNDS - 1
        if is_last and isinstance(history, StoreWorkersHistory):
            history.scheduler.seconds += EXPIRED_S
        share = 1.0 if is_last else history.rng.choice((0.5, 1.0))
        chosen = [n for n in range(history.count) if history.rng.random() < share]
        workers = {n: history.start(n, is_last=is_last) for n in chosen}
        if workers:
            history.scheduler.run(*workers.values())
        published += check_workers(history, workers)
        if published and (is_last or history.rng.random() < 0.7):
            break
        if not is_last:
            history.crash_all()
    if history.current() != history.plan.tree:
        raise Violation(f"all workers have run, and a reader sees {describe(history.current())}")
    late = history.start(history.rng.randrange(history.count), is_last=True)
    history.scheduler.seconds += EXPIRED_S
    history.scheduler.run(late)
    check_workers(history, {0: late})
    if late.error is not None:
        raise Violation(f"a worker that is late fails: {late.error!r}") from late.error
    if late.result.worker.state not in ("complete", "published"):
        raise Violation(f"a worker that is late is {late.result.worker.state}")
    if history.left_over():
        raise Violation(f"left behind: {history.left_over()}")


def check_workers(
    history: LocalWorkersHistory | StoreWorkersHistory, workers: dict[int, Process]
) -> int:
    """What must hold at the end of workers; returns how many have published."""
    published = 0
    for number, process in workers.items():
        error = process.error
        head = f"worker {number}/{history.count}, {process.calls} calls: "
        if error is None:
            report: CopyReport = process.result
            state = report.worker.state if report.worker else "?"
            history.events.append(head + state)
            published += state == "published"
            if state in ("published", "complete"):
                if history.current() != history.plan.tree:
                    raise Violation(f"{state}, and a reader sees {describe(history.current())}")
                history.possible = [history.plan.tree]
            continue
        text = getattr(error, "message", "") or type(error).__name__
        history.events.append(head + text)
        if isinstance(error, Violation):
            raise error
        if not isinstance(error, MegtoolError | Killed):
            raise Violation(f"an error of no type: {error!r}") from error
        if history.current() == history.plan.tree and history.plan.tree not in history.possible:
            history.possible.append(history.plan.tree)
    return published
