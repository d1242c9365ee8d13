"""Histories of runs into a store: lost replies, repeated requests, dead and stalled runs."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import SIDECAR
from megtool.errors import MegtoolError
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.plan.execute import CopyReport
from megtool.reshard.staged_write import make_stage, write_staged
from megtool.storage.location.path import location
from megtool.storage.stores.connect import register_store
from tests.support.simulation.disk import SimulatedDisk
from tests.support.simulation.environment import Violation, separate_processes, simulated
from tests.support.simulation.history import SeededHistory, describe
from tests.support.simulation.local_files import LocalFaults, SimulatedFiles
from tests.support.simulation.object_store import URL, SimulatedStore, StoreFaults
from tests.support.simulation.plans import (
    HOME,
    MARKER,
    CurrentDisk,
    TinyPlan,
    Tree,
    reference,
    tiny_plan,
)
from tests.support.simulation.scheduler import Killed, Process, Scheduler

OUT = "run/out"
NOTES = "run/.out.megtool/"
OLD: Tree = {"old.bin": b"former" * 30, "deep/old.json": b"{}", MARKER: b"former"}
EXPIRED_S = 500.0


class StoreHistory(SeededHistory):
    """A history of runs into one store."""

    kind = "store"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scheduler.switches = self.rng.choice((0.05, 0.3, 0.9))
        self.store = SimulatedStore(self.scheduler)
        self.store.observe = self.observe
        self.disk = SimulatedDisk()
        self.disk.clock = self.scheduler.time_ns
        self.draw_plans(stored_plan)
        self.draw_former(0.5, OLD, OUT, self.store.put)
        self.last_number = -1

    # ---- the model

    def tree(self) -> Tree | None:
        """The objects of the destination."""
        objects = self.store.objects()
        if self.plan.is_file:
            return {"": objects[OUT]} if OUT in objects else None
        return self.store.objects(OUT) or None

    @property
    def is_refused(self) -> bool:
        """Whether readers of megtool refuse the destination, because a run is publishing."""
        data = self.store.objects().get(f"{NOTES}publishing")
        if data is None:
            return False
        values = json.loads(data)
        is_last = values["state"] == "writing" and values["last"] in self.store.objects()
        return values["state"] in ("removing", "writing") and not is_last

    def observe(self) -> None:
        """Look at the destination as readers do: megtool's own, and others, who see markers."""
        if self.store.is_intruded:
            return
        found = self.tree()
        allowed = [None, *self.possible, *(tiny.tree for tiny in self.running)]
        if found in allowed:
            return
        if not self.is_refused:
            raise Violation(f"a reader sees {describe(found)}")
        if found is not None and MARKER in found:
            raise Violation(f"with a marker of completeness a reader sees {describe(found)}")

    # ---- runs

    def write(self, process: Process, tiny: TinyPlan) -> CopyReport:
        """One run of the engine."""
        files = SimulatedFiles(self.disk, process, LocalFaults(self.rng))
        return run_into_store(tiny, files, overwrite=self.overwrite)

    def attempt(
        self, *runs: tuple[TinyPlan, StoreFaults, int, int], is_last: bool = False
    ) -> list[Process]:
        """Run processes, each `(plan, faults, call of its death, call of its stall)`."""
        self.running = [tiny for tiny, *_ in runs]
        if len(runs) > 1 or runs[0][0].number != self.last_number:
            self.store.uploaded.clear()
        self.last_number = runs[0][0].number if len(runs) == 1 else -1
        processes = []
        for tiny, faults, dies_at, stalls_at in runs:
            process = self.scheduler.process(functools.partial(self.write, tiny=tiny))
            process.dies_at, process.stalls_at = dies_at, stalls_at
            is_open = not tiny.is_file and not is_last
            if is_open and self.rng.random() < 0.06:
                process.intruded_at = self.rng.randint(20, tiny.calls)
            process.slowness = self.rng.choice((1.0, 1.0, 10.0))
            self.store.faults[process] = faults
            processes.append(process)
        self.scheduler.run(*processes)
        is_intruded = self.store.remove_intruder()
        if is_intruded and any(p.error is None for p in processes):
            raise Violation("complete, with what another program has written")
        for process, (tiny, faults, *_) in zip(processes, runs, strict=True):
            self.check_end(process, tiny, faults)
        repeated = [place for place, count in self.store.uploaded.items() if count > 1]
        if repeated and len(runs) == 1:
            raise Violation(f"finished parts are uploaded again: {repeated}")
        self.running = []
        return processes

    def check_end(self, process: Process, tiny: TinyPlan, faults: StoreFaults) -> None:
        """What must hold at the end of a run."""
        error, head = process.error, f"plan {tiny.number}, {process.calls} calls, "
        head += f"{faults.end if faults.has_struck else 'no fault'}: "
        found = self.tree()
        if error is None:
            self.events.append(head + "complete")
            if process.result.repaired:
                raise Violation(f"{process.result.repaired} finished units were written again")
            if found not in [t.tree for t in self.running] and not self.is_refused:
                raise Violation(f"complete, but a reader sees {describe(found)}")
            if len(self.running) == 1 and found != tiny.tree:
                raise Violation(f"complete, but a reader sees {describe(found)}")
            self.possible = [t.tree for t in self.running if t.tree == found] or self.possible
            self.store.uploaded.clear()
            return
        self.events.append(head + (getattr(error, "message", "") or type(error).__name__))
        if isinstance(error, Violation):
            raise error
        if not isinstance(error, MegtoolError | Killed):
            raise Violation(f"an error of no type: {error!r}") from error
        if found == tiny.tree:
            self.possible = [tiny.tree]
            self.store.uploaded.clear()  # the next run starts anew, if it may overwrite

    def run(self) -> None:
        """Run the history.

        Raises:
            Violation: something that must hold does not.
        """
        CurrentDisk.disk = self.disk
        rng = self.rng
        with in_store(self.scheduler, self.store):
            for _ in range(rng.choice((1, 1, 2, 3, 4))):
                if self.step():
                    break
            self.finish()

    def step(self) -> bool:
        """One attempt; whether it was complete and is not to be repeated."""
        runs = [self.draw_run(self.other if self.rng.random() < 0.12 else self.plan)]
        if self.rng.random() < 0.2:
            runs.append(self.draw_run(self.rng.choice((self.plan, self.other))))
        processes = self.attempt(*runs)
        if self.rng.random() < 0.3:
            self.scheduler.seconds += EXPIRED_S
        return any(p.error is None for p in processes) and self.rng.random() < 0.7

    def draw_run(self, tiny: TinyPlan) -> tuple[TinyPlan, StoreFaults, int, int]:
        """A plan, and what happens to its run."""
        rng = self.rng
        number = rng.randint(rng.choice((1, 1, tiny.calls // 2)), int(tiny.calls * 1.05))
        kind = rng.choice(("dies", "dies", "dead", "dead", "refused", "lost", "stalls", ""))
        end = kind if kind in ("dead", "refused", "lost") else ""
        repeats = rng.choice((0.0, 0.0, 0.02, 0.2))
        faults = StoreFaults(rng, number=number if end else 0, end=end, repeats=repeats)
        return tiny, faults, number * (kind == "dies"), number * (kind == "stalls")

    def finish(self) -> None:
        """A last run without faults completes, and leaves nothing but the checkpoint."""
        self.scheduler.seconds += EXPIRED_S
        before, is_refused = self.tree(), self.is_refused
        (process,) = self.attempt((self.plan, StoreFaults(self.rng), 0, 0), is_last=True)
        if process.error is not None:
            is_there = getattr(process.error, "error_id", "") == "destination-exists"
            if not is_there or self.overwrite or is_refused:
                raise Violation(f"the last run fails: {process.error!r}") from process.error
            if before not in (self.plan.tree, self.other.tree) or self.tree() != before:
                raise Violation(f"the last run is refused, and leaves {describe(self.tree())}")
        elif self.tree() != self.plan.tree:
            raise Violation("the last run wrote something else")
        notes = [key for key in self.store.objects() if ".megtool/" in key]
        if notes or self.store.open_uploads:
            raise Violation(f"left behind: {notes}, uploads of {self.store.open_uploads}")


@contextlib.contextmanager
def in_store(scheduler: Scheduler, store: SimulatedStore) -> Iterator[None]:
    """Let URLs of the simulated store mean this one, and every process have its own memory."""
    register_store(store)
    with simulated(scheduler), separate_processes(scheduler):
        yield


def run_into_store(tiny: TinyPlan, files: SimulatedFiles, *, overwrite: bool) -> CopyReport:
    """Execute a plan and publish it, as `reshard` does."""
    options = ExecutionOptions(threads=1, memory="1MiB", digest=tiny.digest, overwrite=overwrite)
    stage = make_stage(
        options,
        location(f"{URL}/{OUT}"),
        files=files,
        fingerprint=tiny.plan.fingerprint,
        is_file=tiny.is_file,
        sources=[Path(HOME) / f"source{tiny.number}"],
        plan=tiny.plan,
    )
    finish: Any = (lambda copied: None) if tiny.is_file else None
    return write_staged(
        tiny.plan, stage, options, verb="reshard", progress=lambda *_: None, finish=finish
    )


@functools.cache
def stored_plan(number: int) -> TinyPlan:
    """A plan with the objects of a run without faults, which agree with numpy."""
    tiny = tiny_plan(number, is_fresh=True)
    disk, scheduler = SimulatedDisk(), Scheduler(random.Random(0))
    CurrentDisk.disk = disk
    for path, data in tiny.source.items():
        disk.put(path, data)
    store = SimulatedStore(scheduler)

    def write(process: Process) -> CopyReport:
        files = SimulatedFiles(disk, process, LocalFaults(scheduler.rng))
        return run_into_store(tiny, files, overwrite=False)

    process = scheduler.process(write)
    with in_store(scheduler, store):
        scheduler.run(process)
    if process.error is not None:
        raise process.error
    tiny.tree = {"": store.objects()[OUT]} if tiny.is_file else store.objects(OUT)
    tiny.calls = process.calls
    expected = reference(number)
    if tiny.is_file:
        expected = {"": expected["out"]}
    if {n: d for n, d in tiny.tree.items() if n != SIDECAR} != expected:
        raise Violation(f"plan {number} writes something else than numpy")
    assert tiny.digest is not DigestMode.BUFFERED
    return tiny
