"""Executes a plan: in parallel, resumable, in bounded memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.digest import DigestMode, Digests
from megtool.checkpoint.plan import Op, ReshardPlan
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.open_files import OpenFiles
from megtool.checkpoint.transport.cast import limit_torch_threads, needs_torch
from megtool.checkpoint.transport.encoded_chunks import SourceFiles
from megtool.checkpoint.transport.reduce import sum_dtype
from megtool.checkpoint.transport.shard_locator import ShardLocator
from megtool.checkpoint.transport.strided import PeakMemory
from megtool.checkpoint.transport.work_units import (
    KernelUnit,
    TiledUnit,
    Unit,
    UnitSchedule,
    plan_units,
)
from megtool.checkpoint.transport.worker import CopyContext, Worker
from megtool.checkpoint.work_threads import run_in_threads
from megtool.console import several
from megtool.dtypes import dtype
from megtool.errors import CheckpointError, DigestError, listed
from megtool.tensors.box import numel


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """The result of executing a plan.

    `num_bytes` counts bytes of the target by operation; `kernel_bytes` of them never entered this
    process. `verified` units were finished by an earlier run and compared with the source;
    `repaired` of them differed and were written again. `kernel_files` are the files of which the
    kernel wrote some bytes. `overflowed` counts, by the source's names, the numbers too large for
    float16, which became infinite.
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


class StagingArea(Protocol):
    """Where a plan is executed: a `StagingFolder` on disk, or a `MemoryStage`."""

    @property
    def resumed(self) -> set[int]:
        """Units finished by an earlier run."""

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """Create a file of its final size; returns the path that opens it.

        It is digested in sections between `cuts`, or not at all if there are none (None).
        """

    def write(self, relative: str, data: bytes) -> Path:
        """Write a whole small file."""

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
    began = time.monotonic()
    written = plan.target.catalogue
    cuts: Sequence[Sequence[int] | None] = [None] * len(written.files)
    if digest is not DigestMode.NONE:
        cuts = _find_cuts(written)
    paths = [stage.create(f.path, f.size, c) for f, c in zip(written.files, cuts, strict=True)]
    target = ShardLocator(plan.target.catalogue, paths)
    with (
        SourceFiles(files, plan.sources) as readers,
        OpenFiles(files, writing=True) as writers,
        limit_torch_threads(_needs_torch(plan)),
    ):
        for file, offset, data in plan.target.fragments:
            with writers.use(paths[file]) as fd:
                files.pwrite_all(fd, data, offset)
        for path, data in plan.target.small_files.items():
            stage.write(path, data)
        run = CopyContext(
            plan=plan,
            files=files,
            readers=readers,
            writers=writers,
            sources=[ShardLocator(c) for c in plan.sources],
            target=target,
            digests=Digests(_digest_sizes(plan)),
            digest=digest,
            memory_bytes=memory_bytes // threads,
            tile_bytes=TILE_BYTES,
            peak=PeakMemory(),
            progress=progress,
        )
        todo = list(enumerate(plan_units(plan, target, tiled_only=digest is DigestMode.ALL)))
        alone = [u for u in todo if isinstance(u[1], TiledUnit) and u[1].interleaved]
        try:
            _run_units(run, stage, todo[: len(todo) - len(alone)], threads)
            _run_units(run, stage, alone, 1)
        except CheckpointError:
            for source in plan.sources:
                source.check_unchanged()  # perhaps the cause of the error
            raise
    for source in plan.sources:
        source.check_unchanged()
    _digest_empty(plan, run)
    _compare_digests(plan, run, expected or {})
    for path, data in plan.target.final_files.items():
        stage.write(path, data)
    return CopyReport(
        num_bytes=dict(run.num_bytes),
        kernel_bytes=run.kernel_bytes,
        kernel_files=tuple(
            sorted(
                {
                    written.files[f].path
                    for _, u in todo
                    if isinstance(u, KernelUnit)
                    for f in u.files
                }
            )
        ),
        seconds=time.monotonic() - began,
        peak_buffer_bytes=run.peak.num_bytes,
        digests=run.digests,
        num_units=len(todo),
        verified=len(stage.resumed & {number for number, _ in todo}),
        repaired=run.repaired,
        overflowed=_count_overflowed(run),
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
    numbers, first = np.unique(file, return_index=True)
    for number, part in zip(numbers.tolist(), np.split(cut, first[1:]), strict=True):
        out[number] = np.unique(part).tolist()
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


TILE_BYTES = 1 << 20
"""What a thread moves at a time: about a core's L2 cache, so that a tile is read, digested and
written while it is there; smaller tiles make threads wait more for the interpreter."""


def _run_units(
    run: CopyContext, stage: StagingArea, todo: Sequence[tuple[int, Unit]], threads: int
) -> None:
    """Run all units; the first error or Ctrl-C stops every thread and is raised."""
    schedule = UnitSchedule(todo)

    def work() -> None:
        worker = Worker(run)
        while not run.stopped.is_set() and (claimed := schedule.take()):
            number, unit = claimed
            worker.do(unit, verify=number in stage.resumed)
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
