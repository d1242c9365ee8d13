"""Executes a plan: in parallel, resumable, in bounded memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megtool.console import several
from megtool.digests.crc32c import Digests
from megtool.dtypes import dtype
from megtool.errors import CheckpointError, DigestError, listed
from megtool.options.execution import DigestMode
from megtool.plan.copies import Op, ReshardPlan
from megtool.plan.work_units import (
    KernelUnit,
    TiledUnit,
    Unit,
    UnitSchedule,
    plan_units,
)
from megtool.plan.worker import CopyContext, Worker
from megtool.process.threads import run_in_threads
from megtool.storage.files import Files
from megtool.storage.location.path import choose_by_latency
from megtool.storage.open_files import OpenFiles
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.grouping import distinct, grouped
from megtool.transport.cast import limit_torch_threads, needs_torch
from megtool.transport.encoded_chunks import SourceFiles
from megtool.transport.reading.parallel_scan import STORE_TILE_BYTES
from megtool.transport.reduce import sum_dtype
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import PeakMemory

if TYPE_CHECKING:
    from megtool.plan.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of executing a plan.

    `num_bytes` counts bytes of the target by operation; `kernel_bytes` of them never entered this
    process. `verified` units were finished by an earlier run and compared with the source;
    `repaired` of them differed and were written again. `kernel_files` are the files of which the
    kernel wrote some bytes. `overflowed` counts, by the source's names, the numbers too large for
    float16, which became infinite, `rounded` the elements of shifted tensors whose sum is not
    exact. `worker` tells of a run of several workers, and the rest is
    about all of them if it was this one that committed, else about its own share.
    """

    num_bytes: Mapping[Op, int]
    kernel_bytes: int
    kernel_files: tuple[str, ...]
    seconds: float
    peak_buffer_bytes: int
    digests: Digests
    num_units: int
    verified: int
    repaired: int
    messages: list[str] = field(default_factory=list)
    overflowed: Mapping[str, int] = field(default_factory=dict)
    rounded: Mapping[str, int] = field(default_factory=dict)
    worker: WorkerStatus | None = None

    @property
    def overflows(self) -> str:
        """`overflowed` as a sentence; empty if nothing overflowed."""
        if not self.overflowed:
            return ""
        total = sum(self.overflowed.values())
        shown = [f"{name} ({n})" for name, n in self.overflowed.items()]
        return (
            f"{several(total, 'number')} of {several(len(shown), 'tensor')} beyond 65504, the "
            f"largest of float16, became infinite: {listed(shown, 4)}"
        )

    @property
    def roundings(self) -> str:
        """`rounded` as a sentence; empty if nothing was rounded."""
        if not self.rounded:
            return ""
        shown = [f"{name} ({n})" for name, n in self.rounded.items()]
        return (
            f"{several(sum(self.rounded.values()), 'element')} of "
            f"{several(len(shown), 'tensor')} rounded, since the target stores them shifted by 1: "
            f"{listed(shown, 4)}; --dtype float32 holds most sums exactly"
        )


class StagingArea(Protocol):
    """Where a plan is executed: a `Stage`, or a `MemoryStage`."""

    @property
    def resumed(self) -> set[int]:
        """Units finished by an earlier run."""

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """Create a file of its final size; returns the path that opens it.

        It is digested in sections between `cuts`, or not at all if there are none (None).
        """

    def write(self, relative: str, data: bytes) -> Path:
        """Write a whole small file."""

    def follow(self, context: CopyContext) -> Container[int]:
        """The units that are finished, and need not be compared; `context` learns their digests."""

    def finish(self, unit: int, note: str = "") -> None:
        """Record that a unit is finished."""


def execute(
    plan: ReshardPlan,
    stage: StagingArea,
    *,
    files: Files,
    threads: int = 1,
    memory_bytes: int = 256 << 20,
    digest: DigestMode = DigestMode.ALL,
    progress: Callable[[int], None] | None = None,
    expected: Mapping[str, int] | None = None,
) -> CopyReport:
    """Write the checkpoint that `plan` describes into an entered `stage`, up to its commit.

    Files get their size first, then headers and small files, then data, then the files that mark a
    checkpoint complete. Units that an earlier run finished are compared with their expected
    contents and repaired. `progress` receives numbers of target bytes, from one thread at a time.
    `expected` are digests of canonical tensors in the source: a tensor copied unchanged must have
    that digest. All buffers together take about `memory_bytes` at most (but at least 384 KiB per
    thread).

    Raises:
        DigestError: a tensor does not have its expected digest.
        SourceChangedError: a source file changed during the copy.
        StorageError: a read or a write failed.
    """
    copy = PlanCopy(
        plan,
        stage,
        files=files,
        threads=threads,
        memory_bytes=memory_bytes,
        digest=digest,
        progress=progress,
    )
    copy.create(range(len(plan.target.catalogue.files)))
    copy.write_headers()
    copy.run(range(len(copy.units)), resumed=stage.resumed)
    return copy.conclude(expected or {})


class PlanCopy:
    """The steps in which a plan is executed, some of which workers share out.

    `is_shared`: other processes write parts of the same files at the same time. `units` are all
    units of the plan. `context` has what was done so far: digests and counts.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        stage: StagingArea,
        *,
        files: Files,
        threads: int,
        memory_bytes: int,
        digest: DigestMode,
        progress: Callable[[int], None] | None = None,
        is_shared: bool = False,
    ) -> None:
        self.plan, self.stage = plan, stage
        self._files, self._threads = files, threads
        self._began = time.monotonic()
        written = plan.target.catalogue
        self._paths = [Path() for _ in written.files]
        locator = ShardLocator(written, self._paths)
        self.verified = 0
        self.kernel_files: set[str] = set()  # of other workers
        self.context = CopyContext(
            plan=plan,
            files=files,
            readers=SourceFiles(files, plan.sources),
            writers=OpenFiles(files, writing=True, is_shared=is_shared),
            sources=[ShardLocator(c) for c in plan.sources],
            target=locator,
            digests=Digests(_digest_sizes(plan)),
            digest=digest,
            memory_bytes=memory_bytes // threads,
            tile_bytes=choose_tile_size(plan.sources),
            peak=PeakMemory(),
            progress=progress,
        )

    @cached_property
    def units(self) -> list[Unit]:
        """All units of the plan, or of the share that it is for."""
        is_tiled = self.context.digest is DigestMode.ALL
        if self.plan.share is not None:
            from megtool.plan.share import plan_share_units

            return plan_share_units(self.plan, self.context.target, tiled_only=is_tiled)
        return plan_units(self.plan, self.context.target, tiled_only=is_tiled)

    def path(self, number: int) -> Path:
        """The path at which a created file of the target is written."""
        return self._paths[number]

    def create(self, numbers: Iterable[int]) -> None:
        """Create files of the target, by number, with their final size."""
        written = self.plan.target.catalogue
        cuts: Sequence[Sequence[int] | None] = [None] * len(written.files)
        if self.context.digest is not DigestMode.NONE:
            cuts = _find_cuts(written)
        for n in numbers:
            file = written.files[n]
            self._paths[n] = self.stage.create(file.path, file.size, cuts[n])

    def write_headers(self) -> None:
        """Write the bytes outside of tensors, and small files."""
        target = self.plan.target
        with self.context.writers as writers:
            for file, offset, data in target.fragments:
                with writers.use(self._paths[file]) as fd:
                    self._files.pwrite_all(fd, data, offset)
        for path, data in target.small_files.items():
            self.stage.write(path, data)

    def run(self, numbers: Iterable[int], *, resumed: Container[int]) -> None:
        """Copy units of which the files exist; those `resumed` are compared and repaired.

        Raises:
            SourceChangedError: a source file changed.
            StorageError: a read or a write failed.
        """
        context, plan = self.context, self.plan
        numbers = list(numbers)
        finished = self.stage.follow(context)
        todo = [(n, self.units[n]) for n in numbers if n not in finished]
        alone = [u for u in todo if isinstance(u[1], TiledUnit) and u[1].interleaved]
        others = [u for u in todo if not (isinstance(u[1], TiledUnit) and u[1].interleaved)]
        with context.readers, context.writers, limit_torch_threads(_needs_torch(plan)):
            try:
                _run_units(context, self.stage, others, self._threads, resumed)
                _run_units(context, self.stage, alone, 1, resumed)
            except CheckpointError:
                self.check_sources()  # perhaps the cause of the error
                raise
        self.check_sources()
        self.verified += sum(n in resumed or n in finished for n in numbers)

    def check_sources(self) -> None:
        """Refuse sources that have changed since they were opened.

        Raises:
            SourceChangedError: one has.
        """
        for source in self.plan.sources:
            source.check_unchanged()

    def compare(self, expected: Mapping[str, int]) -> None:
        """Compare the tensors of which all bytes were read with digests of the source.

        Raises:
            DigestError: one differs.
        """
        _compare_digests(self.plan, self.context, expected)

    def conclude(self, expected: Mapping[str, int]) -> CopyReport:
        """Compare digests, write the files that mark a checkpoint complete, and report.

        Raises:
            DigestError: a tensor does not have its expected digest.
        """
        plan, context = self.plan, self.context
        _digest_empty(plan, context)
        self.compare(expected)
        for path, data in plan.target.final_files.items():
            self.stage.write(path, data)
        return self.report()

    def report(self) -> CopyReport:
        """What was done so far."""
        context, files = self.context, self.plan.target.catalogue.files
        kernel_files = {
            files[f].path for u in self.units if isinstance(u, KernelUnit) for f in u.files
        }
        return CopyReport(
            num_bytes=dict(context.num_bytes),
            kernel_bytes=context.kernel_bytes,
            kernel_files=tuple(sorted(kernel_files | self.kernel_files)),
            seconds=time.monotonic() - self._began,
            peak_buffer_bytes=context.peak.num_bytes,
            digests=context.digests,
            num_units=len(self.units),
            verified=self.verified,
            repaired=context.repaired,
            overflowed=_count_overflowed(context),
            rounded={
                self.plan.source_tensor(self.plan.entries[number]).name: n
                for number, n in sorted(context.rounded.items())
            },
        )


def _find_cuts(catalogue: Catalogue) -> list[list[int]]:
    """By file, the offsets where the bytes of a shard begin and end, ascending."""
    extents = catalogue.extents
    out: list[list[int]] = [[] for _ in catalogue.files]
    if extents.contained or not len(extents):
        return out
    file = np.concatenate([extents.file, extents.file]).astype(np.int64)
    cut = np.concatenate([extents.offset, extents.offset + extents.length])
    order = np.lexsort((cut, file))
    file, cut = file[order], cut[order]
    first, _ = grouped(file)
    for number, part in zip(file[first].tolist(), np.split(cut, first[1:]), strict=True):
        out[number] = distinct(part).tolist()
    return out


def _count_overflowed(run: CopyContext) -> dict[str, int]:
    """Numbers that became infinite, by stored tensor; a tensor copied twice counts once."""
    plan, counted = run.plan, set()
    out: Counter[str] = Counter()
    for number, n in sorted(run.overflowed.items()):
        entry = plan.entries[number]
        key = entry.source_index, entry.source
        if key not in counted:
            counted.add(key)
            out[plan.source_tensor(entry).name] += n
    return dict(sorted((out + run.fed_overflowed).items()))


def choose_tile_size(sources: Sequence[Catalogue]) -> int:
    """What a thread moves at a time."""
    sizes = (choose_by_latency(c.root, TILE_BYTES, STORE_TILE_BYTES) for c in sources)
    return max(sizes, default=TILE_BYTES)


TILE_BYTES = 1 << 20
"""What a thread moves at a time: about a core's L2 cache, so that a tile is read, digested and
written while it is there; smaller tiles make threads wait more for the interpreter."""


def _run_units(
    run: CopyContext,
    stage: StagingArea,
    todo: Sequence[tuple[int, Unit]],
    threads: int,
    resumed: Container[int],
) -> None:
    """Run all units; the first error or Ctrl-C stops every thread and is raised."""
    schedule = UnitSchedule(todo)

    def work() -> None:
        worker = Worker(run)
        while not run.stopped.is_set() and (claimed := schedule.take()):
            number, unit = claimed
            worker.do(unit, verify=number in resumed)
            schedule.release(unit)
            if not run.stopped.is_set():
                stage.finish(number)

    run_in_threads(work, min(threads, len(todo)), run.stopped)


def _needs_torch(plan: ReshardPlan) -> bool:
    """Whether a cast of the plan needs torch."""
    single = dtype("float32")
    for e in plan.entries:
        source_dtype, target_dtype = single, plan.target_tensor(e).dtype
        if e.source is not None and not plan.source_tensor(e).packing:
            source_dtype = plan.source_tensor(e).dtype
        if e.op in (Op.CAST, Op.DECODE) and needs_torch(source_dtype, target_dtype):
            return True
        accumulated = sum_dtype(target_dtype)
        if e.op is Op.MERGE:
            return True
        if e.op is Op.REDUCE and (
            needs_torch(source_dtype, accumulated) or needs_torch(accumulated, target_dtype)
        ):
            return True
    return False


def _digest_sizes(plan: ReshardPlan) -> dict[str, int]:
    """Bytes of every canonical tensor in the target's dtype."""
    return {
        e.canonical: numel(e.shape) * plan.target_tensor(e).dtype.itemsize
        for e in plan.entries
        if e.op is not Op.FILL
    }


def _digest_empty(plan: ReshardPlan, run: CopyContext) -> None:
    """Digest empty tensors, which have no tiles."""
    for e in plan.entries:
        if e.op is not Op.FILL and not numel(e.shape) and run.digest is not DigestMode.NONE:
            run.digests.add(e.canonical, 0, b"")


def _compare_digests(plan: ReshardPlan, run: CopyContext, expected: Mapping[str, int]) -> None:
    for e in plan.entries:
        if e.op is not Op.COPY or e.canonical not in expected:
            continue
        digest = run.digests.get(e.canonical)
        if digest is not None and digest != expected[e.canonical]:
            raise DigestError(
                f"the bytes read have the digest {digest:08x}, "
                f"the source recorded {expected[e.canonical]:08x}",
                file=plan.sources[e.source_index].root,
                tensor=e.canonical,
                hint="a bit flipped in the source since it was written, or it was edited",
            )
