"""Plain: the byte runs of a unit that the kernel copies, as columns in order of destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megtool.checkpoint.plan import Plan, common_runs
from megtool.checkpoint.transport.shard_locator import Locator
from megtool.checkpoint.transport.strided import runs
from megtool.checkpoint.transport.work_units import UNIT_BYTES, Plain
from megtool.tensors.box import Ints
from megtool.tensors.grouping import distinct

_BLOCK = 4096  # file systems share whole blocks only


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs: `length` bytes at `at` of a source's file go to `offset` of the target's file."""

    source: Ints
    file: Ints
    at: Ints
    offset: Ints
    length: Ints

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """The runs one by one."""
        columns = (self.source, self.file, self.at, self.offset, self.length)
        return list(zip(*(c.tolist() for c in columns), strict=True))


def copies(
    plan: Plan, unit: Plain, sources: Sequence[Locator], target: Locator
) -> tuple[Copies, list[int]]:
    """The runs of a unit, adjacent ones joined, and the steps that are no runs after all.

    The latter read a shard that turned out not to be row-major once it was located. They are listed
    with the first part of a unit.
    """
    steps = plan.steps
    index = np.array([plan.entries[e].source_index for e in steps.entry[unit.steps].tolist()])
    found: list[Copies] = []
    others: list[int] = []
    for source in distinct(index).tolist():
        part, permuted = _from_one(plan, unit.steps[index == source], source, sources, target)
        found += part
        others += permuted
    columns = ("source", "file", "at", "offset", "length")
    table = Copies(*(np.concatenate([getattr(c, name) for c in found]) for name in columns))
    table = _joined(table)
    if unit.parts > 1:
        table = _window(table, unit.part * UNIT_BYTES, _end(unit))
    return table, others if unit.part == 0 else []


def _end(unit: Plain) -> int:
    return (unit.part + 1) * UNIT_BYTES if unit.part + 1 < unit.parts else 1 << 62


def _from_one(
    plan: Plan, rows: Ints, source: int, sources: Sequence[Locator], target: Locator
) -> tuple[list[Copies], list[int]]:
    steps, locator = plan.steps, sources[source]
    lo, shape = steps.boxes.lo[rows], steps.boxes.shape[rows]
    piece, to = steps.source_piece[rows], steps.target_piece[rows]
    shard = plan.source_pieces.shard[piece]
    base_a, a = plan.source_lattice(piece, lo)
    base_b, b = plan.target_lattice(to, lo)
    entries = [plan.entries[e] for e in steps.entry[rows].tolist()]
    item = np.array([plan.target_tensor(e).dtype.itemsize for e in entries], np.int64)
    at = locator.offsets(shard) + base_a * item
    offset = target.offsets(plan.target_pieces.shard[to]) + base_b * item
    file = locator.files(shard)
    permuted = locator.permuted(shard)
    run, whole = common_runs(shape, a, b)
    run *= item
    one = whole & ~permuted
    given = np.full(int(one.sum()), source, np.int64)
    found = [Copies(given, file[one], at[one], offset[one], run[one])]
    for row in np.flatnonzero(~whole & ~permuted).tolist():
        size, outer = int(item[row]), _outer(shape[row].tolist(), int(run[row]) // int(item[row]))
        count = shape[row, :outer].tolist()
        x = runs(int(at[row]), count, (a[row, :outer] * size).tolist())
        y = runs(int(offset[row]), count, (b[row, :outer] * size).tolist())
        every = np.ones(len(x), np.int64)
        found.append(
            Copies(
                every * source,
                every * file[row],
                np.array(x, np.int64),
                np.array(y, np.int64),
                every * run[row],
            )
        )
    return found, rows[permuted].tolist()


def _outer(shape: Sequence[int], run: int) -> int:
    """How many leading dimensions enumerate runs of `run` elements."""
    outer = len(shape)
    while run > 1:
        outer -= 1
        run //= shape[outer]
    return outer


def _joined(table: Copies) -> Copies:
    """In order of destination, with runs joined that follow one another on both sides."""
    order = np.argsort(table.offset, kind="stable")
    source, file, at, offset, length = (
        c[order] for c in (table.source, table.file, table.at, table.offset, table.length)
    )
    if not len(order):
        return table
    follows = (source[1:] == source[:-1]) & (file[1:] == file[:-1])
    follows &= (at[:-1] + length[:-1] == at[1:]) & (offset[:-1] + length[:-1] == offset[1:])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Copies(
        source[first], file[first], at[first], offset[first], np.add.reduceat(length, first)
    )


def _window(table: Copies, begin: int, end: int) -> Copies:
    """Bytes `begin:end` of the runs laid end to end; cuts inside a run fall back to a block."""
    before = np.cumsum(table.length) - table.length
    lo = _cut_in(table, before, begin)
    hi = _cut_in(table, before, end)
    keep = lo < hi
    return Copies(
        table.source[keep],
        table.file[keep],
        (table.at + lo)[keep],
        (table.offset + lo)[keep],
        (hi - lo)[keep],
    )


def _cut_in(table: Copies, before: Ints, position: int) -> Ints:
    """Where a position cuts each run, moved down to a block of the target where one is inside."""
    cut = np.clip(position - before, 0, table.length)
    inside = (cut > 0) & (cut < table.length)
    return np.where(inside, np.maximum(cut - (table.offset + cut) % _BLOCK, 0), cut)
