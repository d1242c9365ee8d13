"""Byte runs that the kernel copies for a unit, as columns in order of destination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megtool.plan.copies import ReshardPlan, common_runs
from megtool.plan.work_units import KernelUnit
from megtool.tensors.box import Ints
from megtool.tensors.grouping import distinct
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import run_offsets

_BLOCK = 4096  # file systems share whole blocks only

TargetRun = tuple[int, int, int]
"""A file of the target, an offset in it, and a length in bytes."""


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Runs of `length` bytes from `source_offset` of a file to `target_offset` of the target's."""

    source: Ints
    file: Ints
    source_offset: Ints
    target_file: Ints
    target_offset: Ints
    length: Ints

    def __getitem__(self, rows: Ints | NDArray[np.bool_] | slice) -> CopyRuns:
        return CopyRuns(*(getattr(self, c)[rows] for c in self.__slots__))

    def rows(self) -> list[tuple[int, int, int, int, int, int]]:
        """The runs one by one."""
        return list(zip(*(getattr(self, c).tolist() for c in self.__slots__), strict=True))

    def read_calls(self) -> list[CopyRuns]:
        """The runs in parts that follow each other in a file, if they are in its order."""
        end = self.source_offset + self.length
        follows = (self.source[1:] == self.source[:-1]) & (self.file[1:] == self.file[:-1])
        follows &= end[:-1] == self.source_offset[1:]
        first = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(end)]
        return [self[a:b] for a, b in pairwise(first) if a < b]

    def in_steps(self, num_bytes: int) -> Iterator[tuple[int, list[TargetRun]]]:
        """Runs that follow each other in a file, in steps of about `num_bytes`.

        Each step has the offset at which it begins in the file; long runs are cut.
        """
        begin, size, step = int(self.source_offset[0]), 0, list[TargetRun]()
        columns = (self.target_file, self.target_offset, self.length)
        for file, start, length in zip(*(c.tolist() for c in columns), strict=True):
            done = 0
            while done < length:
                part = min(length - done, num_bytes - size)
                step.append((file, start + done, part))
                done, size = done + part, size + part
                if size == num_bytes:
                    yield begin, step
                    begin, size, step = begin + size, 0, []
        if step:
            yield begin, step


def spans_of(runs: Iterable[TargetRun]) -> dict[int, tuple[int, int]]:
    """The range in which runs lie, of each file of the target."""
    spans: dict[int, tuple[int, int]] = {}
    for file, start, length in runs:
        lo, hi = spans.get(file, (start, start))
        spans[file] = min(lo, start), max(hi, start + length)
    return spans


def plan_kernel_copies(
    plan: ReshardPlan, unit: KernelUnit, sources: Sequence[ShardLocator], target: ShardLocator
) -> tuple[CopyRuns, list[int]]:
    """The runs of a unit, adjacent ones joined, and the steps that cannot be copied as runs.

    Runs are in order of the target, or of the source where they fill memory.
    The latter read a shard that is not row-major, which is known only once it is located. They are
    listed with the first part of a unit.
    """
    steps = plan.steps
    index = np.array([plan.entries[e].source_index for e in steps.entry[unit.steps].tolist()])
    tables: list[CopyRuns] = []
    other_steps: list[int] = []
    for source in distinct(index).tolist():
        part, permuted = _runs_from_source(
            plan, unit.steps[index == source], source, sources, target
        )
        tables += part
        other_steps += permuted
    columns = CopyRuns.__slots__
    table = CopyRuns(*(np.concatenate([getattr(c, name) for c in tables]) for name in columns))
    place = (table.target_offset, table.target_file)
    if plan.fills_memory:
        place = (table.source_offset, table.file)
    table = _join_runs(table[np.lexsort(place)])
    if unit.parts > 1:
        table = _cut_window(table, unit.part * unit.part_bytes, _part_end(unit))
    return table, other_steps if unit.part == 0 else []


def _part_end(unit: KernelUnit) -> int:
    return (unit.part + 1) * unit.part_bytes if unit.part + 1 < unit.parts else 1 << 62


def _runs_from_source(
    plan: ReshardPlan,
    rows: Ints,
    source: int,
    sources: Sequence[ShardLocator],
    target: ShardLocator,
) -> tuple[list[CopyRuns], list[int]]:
    steps, locator = plan.steps, sources[source]
    lo, shape = steps.boxes.lo[rows], steps.boxes.shape[rows]
    piece, to = steps.source_piece[rows], steps.target_piece[rows]
    shard = plan.source_pieces.shard[piece]
    base_a, a = plan.source_lattice(piece, lo)
    base_b, b = plan.target_lattice(to, lo)
    entries = [plan.entries[e] for e in steps.entry[rows].tolist()]
    item = np.array([plan.target_tensor(e).dtype.itemsize for e in entries], np.int64)
    source_offset = locator.offsets(shard) + base_a * item
    target_offset = target.offsets(plan.target_pieces.shard[to]) + base_b * item
    file = locator.files(shard)
    target_file = target.files(plan.target_pieces.shard[to])
    permuted = locator.is_permuted(shard)
    run, is_single_run = common_runs(shape, a, b)
    run *= item
    is_plain = is_single_run & ~permuted
    source_column = np.full(int(is_plain.sum()), source, np.int64)
    tables = [
        CopyRuns(
            source_column,
            file[is_plain],
            source_offset[is_plain],
            target_file[is_plain],
            target_offset[is_plain],
            run[is_plain],
        )
    ]
    for row in np.flatnonzero(~is_single_run & ~permuted).tolist():
        size, outer = (
            int(item[row]),
            _count_outer_dims(shape[row].tolist(), int(run[row]) // int(item[row])),
        )
        count = shape[row, :outer].tolist()
        x = run_offsets(int(source_offset[row]), count, (a[row, :outer] * size).tolist())
        y = run_offsets(int(target_offset[row]), count, (b[row, :outer] * size).tolist())
        every = np.ones(len(x), np.int64)
        tables.append(
            CopyRuns(
                every * source,
                every * file[row],
                np.array(x, np.int64),
                every * target_file[row],
                np.array(y, np.int64),
                every * run[row],
            )
        )
    return tables, rows[permuted].tolist()


def _count_outer_dims(shape: Sequence[int], run: int) -> int:
    """The number of leading dimensions that enumerate runs of `run` elements."""
    outer = len(shape)
    while run > 1:
        outer -= 1
        run //= shape[outer]
    return outer


def _join_runs(table: CopyRuns) -> CopyRuns:
    """Join runs that are adjacent in source and target, and follow each other."""
    if not len(table.length):
        return table
    follows = np.ones(len(table.length) - 1, bool)
    for numbers in (table.source, table.file, table.target_file):
        follows &= numbers[1:] == numbers[:-1]
    for offset in (table.source_offset, table.target_offset):
        follows &= (offset + table.length)[:-1] == offset[1:]
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return replace(table[first], length=np.add.reduceat(table.length, first))


def _cut_window(table: CopyRuns, begin: int, end: int) -> CopyRuns:
    """Bytes `begin:end` of the concatenated runs; a cut inside a run moves down to a block."""
    before = np.cumsum(table.length) - table.length
    lo = _cut_run(table, before, begin)
    hi = _cut_run(table, before, end)
    window = replace(
        table,
        source_offset=table.source_offset + lo,
        target_offset=table.target_offset + lo,
        length=hi - lo,
    )
    return window[lo < hi]


def _cut_run(table: CopyRuns, before: Ints, position: int) -> Ints:
    """The position at which each run is cut, moved down to a block of the target if possible."""
    cut = np.clip(position - before, 0, table.length)
    inside = (cut > 0) & (cut < table.length)
    return np.where(inside, np.maximum(cut - (table.target_offset + cut) % _BLOCK, 0), cut)
