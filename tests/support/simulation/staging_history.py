"""Histories of runs into a staging folder: faults, crashes, rivals; what must hold after them."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import SIDECAR
from megtool.errors import MegtoolError
from megtool.options.execution import ExecutionOptions
from megtool.plan.execute import CopyReport
from megtool.reshard.staged_write import write_staged
from megtool.staging.folder.place import FolderPlace
from megtool.staging.open_stage import open_stage
from megtool.staging.stage import Stage
from tests.support.simulation.disk import SimulatedDisk
from tests.support.simulation.environment import Violation, simulated
from tests.support.simulation.history import SeededHistory, describe
from tests.support.simulation.local_files import LocalFaults, SimulatedFiles
from tests.support.simulation.plans import (
    HOME,
    CurrentDisk,
    TinyPlan,
    Tree,
    reference,
    tiny_plan,
)
from tests.support.simulation.scheduler import Killed, Process, Scheduler

OUT = f"{HOME}/out"
OLD: Tree = {"old.bin": b"former" * 30, "deep/old.json": b"{}"}


class WatchedPlace(FolderPlace):
    """A folder that tells which units it has finished."""

    finished: set[int]

    def finish(self, unit: int, note: str = "") -> None:
        """See `Place`."""
        super().finish(unit, note)
        self.finished.add(unit)


class StagingHistory(SeededHistory):
    """A history of runs on one file system."""

    kind = "staging"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.scheduler.jumps = rng.choice((0.0, 0.01))
        self.scheduler.switches = rng.choice((0.05, 0.3, 0.9))
        self.disk = SimulatedDisk(
            exchanges=rng.random() < 0.7,
            refuses_overwrite=rng.random() < 0.7,
            locks=rng.random() < 0.9,
            copies=rng.random() < 0.7,
            reuses=rng.random() < 0.7,
        )
        self.draw_plans(planned)
        self.draw_former(0.6, OLD, OUT, self.disk.put)
        self.seen = self.possible[0]
        self.finished: dict[int, set[int]] = {}
        self.disk.observe = self.observe
        self.disk.clock = self.scheduler.time_ns

    # ---- the model

    def observe(self) -> None:
        """Look at the destination as a reader does."""
        found = self.disk.tree(OUT)
        allowed = [*self.possible, *(tiny.tree for tiny in self.running)]
        if found is None and self.seen is not None and self.may_be_moved:
            if self.disk.tree(f"{HOME}/.out.megtool/old") not in allowed:
                raise Violation("the old checkpoint is lost")
            return
        if found == self.seen:
            return
        if found not in allowed:
            raise Violation(f"a reader sees {describe(found)}")
        if len(self.running) == 1 and self.seen == self.running[0].tree:
            raise Violation("the new checkpoint became the old one again")
        self.seen = found

    @property
    def may_be_moved(self) -> bool:
        """Whether the old checkpoint is elsewhere between two renames."""
        return not self.disk.exchanges and not self.plan.is_file

    def crash(self) -> None:
        """The machine loses power."""
        self.disk.crash(self.rng)
        found = self.disk.tree(OUT)
        self.events.append(f"crash: {describe(found)}")
        if found is None and None not in self.possible and self.may_be_moved:
            if self.disk.tree(f"{HOME}/.out.megtool/old") not in self.possible:
                raise Violation("the old checkpoint is lost")
        elif found not in self.possible:
            raise Violation(f"after a crash of the machine a reader sees {describe(found)}")
        else:
            self.possible = [found]
        self.seen = found
        self.finished.clear()

    # ---- runs

    def write(self, process: Process, tiny: TinyPlan, faults: LocalFaults) -> CopyReport:
        """One run of the engine."""
        files = SimulatedFiles(self.disk, process, faults)
        place = WatchedPlace(
            Path(OUT),
            files=files,
            fingerprint=tiny.plan.fingerprint,
            overwrite=self.overwrite,
            is_file=tiny.is_file,
            sources=[Path(HOME) / f"source{tiny.number}"],
        )
        place.finished = set()
        try:
            return run_engine(tiny, Stage(place))
        finally:
            if process.is_dead:
                self.finished.setdefault(tiny.number, set()).update(place.finished)

    def attempt(self, *runs: tuple[TinyPlan, LocalFaults, int]) -> list[Process]:
        """Run processes, each `(plan, faults, the call at which it dies)`, until all have ended."""
        processes = []
        self.running = [tiny for tiny, _, _ in runs]
        former = {n: set(units) for n, units in self.finished.items()}
        for tiny, _, _ in runs:  # what other plans have staged may be discarded
            self.finished = {n: u for n, u in self.finished.items() if n == tiny.number}
        for tiny, faults, dies_at in runs:
            process = self.scheduler.process(
                functools.partial(self.write, tiny=tiny, faults=faults)
            )
            process.dies_at = dies_at
            process.slowness = self.rng.choice((1.0, 1.0, 10.0))
            processes.append(process)
        self.scheduler.run(*processes)
        if len({tiny.number for tiny, _, _ in runs}) > 1:
            self.finished.clear()
        for process, (tiny, faults, _) in zip(processes, runs, strict=True):
            self.check_end(process, tiny, faults, former.get(tiny.number, set()))
        self.running = []
        return processes

    def check_end(
        self, process: Process, tiny: TinyPlan, faults: LocalFaults, former: set[int]
    ) -> None:
        """What must hold at the end of a run."""
        error = process.error
        head = f"plan {tiny.number}, {process.calls} calls, {faults.struck or 'no errno'}: "
        if error is None:
            self.events.append(head + "complete")
            report: CopyReport = process.result
            if report.repaired:
                raise Violation(f"{report.repaired} finished units were written again")
            if len(self.running) == 1 and not former <= set(range(report.num_units)):
                raise Violation("units have other numbers")
            if len(self.running) == 1 and report.verified < len(former):
                raise Violation(f"{report.verified} units are kept, {len(former)} were finished")
            if self.seen in [t.tree for t in self.running]:  # of two, the last to be complete
                self.possible = [self.seen]
            self.finished.clear()
            if len(self.running) == 1 and self.seen != tiny.tree:
                raise Violation(f"complete, but a reader sees {describe(self.seen)}")
            return
        self.events.append(head + (getattr(error, "message", "") or type(error).__name__))
        if isinstance(error, Violation):
            raise error
        if not isinstance(error, MegtoolError | Killed):
            raise Violation(f"an error of no type: {error!r}") from error
        if faults.struck:
            self.finished.clear()  # after a failed fsync nothing is kept
        if self.seen == tiny.tree:
            self.finished.clear()  # the next run starts anew, if it may overwrite
            if tiny.tree not in self.possible:
                self.possible.append(tiny.tree)

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: something that must hold does not.
        """
        CurrentDisk.disk = self.disk
        rng = self.rng
        with simulated(self.scheduler):
            for _ in range(rng.choice((1, 1, 2, 3, 4))):
                if self.step():
                    break
                if rng.random() < 0.3:
                    self.disk.settle()
            self.finish()

    def step(self) -> bool:
        """One attempt; whether it was complete and is not to be repeated."""
        rng = self.rng
        tiny = self.other if rng.random() < 0.12 else self.plan
        faults = LocalFaults(rng, short=rng.choice((0.0, 0.0, 0.3)))
        dies_at, kind = 0, rng.random()
        if kind < 0.7:
            first = rng.choice((1, 1, tiny.calls - 50))  # the end is where most can go wrong
            dies_at = rng.randint(first, int(tiny.calls * 1.05))
        elif kind < 0.9:
            faults.at = rng.randint(1, tiny.calls)
        runs = [(tiny, faults, dies_at)]
        if self.disk.locks and rng.random() < 0.2:
            rival = rng.choice((self.plan, self.other))
            dies = rng.choice((0, rng.randint(1, rival.calls)))
            runs.append((rival, LocalFaults(rng), dies))
        processes = self.attempt(*runs)
        is_complete = any(p.error is None for p in processes)
        if rng.random() < 0.45:
            self.crash()
        return is_complete and rng.random() < 0.7

    def finish(self) -> None:
        """A last run without faults completes, and leaves nothing but the checkpoint."""
        before = self.disk.tree(OUT)
        (process,) = self.attempt((self.plan, LocalFaults(self.rng), 0))
        if process.error is not None:
            is_refused = getattr(process.error, "error_id", "") == "destination-exists"
            if not is_refused or self.overwrite or before not in (self.plan.tree, self.other.tree):
                raise Violation(f"the last run fails: {process.error!r}") from process.error
            if self.disk.tree(OUT) != before:
                raise Violation("a refused run changed the checkpoint")
        elif self.disk.tree(OUT) != self.plan.tree:
            raise Violation("the last run wrote something else")
        names = set(self.disk.find(HOME).names) - {"out"}
        if any(not name.startswith("source") for name in names):
            raise Violation(f"left behind: {sorted(names)}")
        if self.rng.random() < 0.3:
            self.crash()


def run_engine(tiny: TinyPlan, stage: Stage) -> CopyReport:
    """Execute a plan and commit it, as `reshard` does."""
    options = ExecutionOptions(threads=1, memory="1MiB", digest=tiny.digest)
    finish: Any = (lambda copied: None) if tiny.is_file else None
    return write_staged(
        tiny.plan, stage, options, verb="reshard", progress=lambda *_: None, finish=finish
    )


@functools.cache
def planned(number: int) -> TinyPlan:
    """A plan with the tree of a run without faults, which agrees with numpy."""
    tiny = tiny_plan(number)
    disk = SimulatedDisk()
    CurrentDisk.disk = disk
    for path, data in tiny.source.items():
        disk.put(path, data)
    scheduler = Scheduler(random.Random(0))

    def write(process: Process) -> CopyReport:
        files = SimulatedFiles(disk, process, LocalFaults(scheduler.rng))
        fingerprint = tiny.plan.fingerprint
        stage = open_stage(Path(OUT), files=files, fingerprint=fingerprint, is_file=tiny.is_file)
        return run_engine(tiny, stage)

    process = scheduler.process(write)
    with simulated(scheduler):
        scheduler.run(process)
    if process.error is not None:
        raise process.error
    tiny.tree, tiny.calls = disk.tree(OUT) or {}, process.calls
    expected = reference(number)
    if tiny.is_file:
        expected = {"": expected["out"]}
    if {n: d for n, d in tiny.tree.items() if n != SIDECAR} != expected:
        raise Violation(f"plan {number} writes something else than numpy")
    return tiny
