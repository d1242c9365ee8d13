"""Byte runs that the kernel copies for a unit, as columns in order of destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megtool.checkpoint.plan import ReshardPlan, common_runs
from megtool.checkpoint.transport.shard_locator import ShardLocator
from megtool.checkpoint.transport.strided import run_offsets
from megtool.checkpoint.transport.work_units import KernelUnit
from megtool.tensors.box import Ints
from megtool.tensors.grouping import distinct

_BLOCK = 4096  # file systems share whole blocks only


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Runs of `length` bytes from `source_offset` of a file to `target_offset` of the target."""

    source: Ints
    file: Ints
    source_offset: Ints
    target_offset: Ints
    length: Ints

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """The runs one by one."""
        columns = (self.source, self.file, self.source_offset, self.target_offset, self.length)
        return list(zip(*(c.tolist() for c in columns), strict=True))


def plan_kernel_copies(
    plan: ReshardPlan, unit: KernelUnit, sources: Sequence[ShardLocator], target: ShardLocator
) -> tuple[CopyRuns, list[int]]:
    """The runs of a unit, adjacent ones joined, and the steps that cannot be copied as runs.

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
    columns = ("source", "file", "source_offset", "target_offset", "length")
    table = CopyRuns(*(np.concatenate([getattr(c, name) for c in tables]) for name in columns))
    table = _join_runs(table)
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
    """Sort by destination and join runs that are adjacent in source and target."""
    order = np.argsort(table.target_offset, kind="stable")
    source, file, source_offset, target_offset, length = (
        c[order]
        for c in (table.source, table.file, table.source_offset, table.target_offset, table.length)
    )
    if not len(order):
        return table
    follows = (source[1:] == source[:-1]) & (file[1:] == file[:-1])
    follows &= (source_offset[:-1] + length[:-1] == source_offset[1:]) & (
        target_offset[:-1] + length[:-1] == target_offset[1:]
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return CopyRuns(
        source[first],
        file[first],
        source_offset[first],
        target_offset[first],
        np.add.reduceat(length, first),
    )


def _cut_window(table: CopyRuns, begin: int, end: int) -> CopyRuns:
    """Bytes `begin:end` of the concatenated runs; a cut inside a run moves down to a block."""
    before = np.cumsum(table.length) - table.length
    lo = _cut_run(table, before, begin)
    hi = _cut_run(table, before, end)
    keep = lo < hi
    return CopyRuns(
        table.source[keep],
        table.file[keep],
        (table.source_offset + lo)[keep],
        (table.target_offset + lo)[keep],
        (hi - lo)[keep],
    )


def _cut_run(table: CopyRuns, before: Ints, position: int) -> Ints:
    """The position at which each run is cut, moved down to a block of the target if possible."""
    cut = np.clip(position - before, 0, table.length)
    inside = (cut > 0) & (cut < table.length)
    return np.where(inside, np.maximum(cut - (table.target_offset + cut) % _BLOCK, 0), cut)
