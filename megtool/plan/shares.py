"""Shares of a plan's units: balanced by bytes, the same whoever computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megtool.plan.work_units import TiledUnit, Unit
from megtool.tensors.box import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Units by their number in `plan_units`: those of each worker, and those of the publisher.

    The units of a worker are contiguous in the order of the target's bytes (`order`, numbers of
    units; worker `i` has `order[cuts[i]:cuts[i + 1]]`). `late` units read and write bytes between
    those of several workers, so whoever publishes does them, when all others are done.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    late: frozenset[int]

    def of(self, worker: int) -> list[int]:
        """The units of a worker, ascending, which is the order in which they are done."""
        own = self.order[self.cuts[worker] : self.cuts[worker + 1]]
        return sorted(n for n in own if n not in self.late)


def split_units(units: Sequence[Unit], count: int) -> Shares:
    """Shares of about the same number of bytes for `count` workers.

    Units that fill gaps between others (`interleaved`) rewrite what lies there. Where it costs
    little balance, their files go to one worker as a whole; the others of them are `late`.
    """
    order = sorted(range(len(units)), key=lambda n: (units[n].files[0], units[n].offset, n))
    size = np.array([units[n].num_bytes for n in order], np.int64)
    end = np.cumsum(size)
    total = int(end[-1]) if len(end) else 0
    marks = np.array([total * i // count for i in range(count + 1)], np.int64)
    cuts = np.searchsorted(end - size // 2, marks, side="left")
    cuts[0], cuts[-1] = 0, len(order)
    if any(_is_interleaved(u) for u in units):
        cuts = _move_to_files(units, order, end, cuts, total // (2 * count))
    return Shares(
        order=tuple(order),
        cuts=tuple(cuts.tolist()),
        late=_find_late(units, order, cuts.tolist()),
    )


def _is_interleaved(unit: Unit) -> bool:
    return isinstance(unit, TiledUnit) and unit.interleaved


def _move_to_files(
    units: Sequence[Unit], order: Sequence[int], end: Ints, cuts: Ints, most: int
) -> Ints:
    """Move cuts inside files that have interleaved units to a border of the file, by `most` bytes
    or less."""
    files = np.array([units[n].files[0] for n in order], np.int64)
    mixed = {f for u in units if _is_interleaved(u) for f in u.files}
    begin = np.concatenate([[0], end])  # bytes before each unit
    out = cuts.copy()
    for i, cut in enumerate(cuts.tolist()):
        if not 0 < cut < len(order) or files[cut] != files[cut - 1] or files[cut] not in mixed:
            continue
        first, last = (
            np.searchsorted(files, files[cut], "left"),
            np.searchsorted(files, files[cut], "right"),
        )
        best = min((int(first), int(last)), key=lambda k: abs(int(begin[k] - begin[cut])))
        if abs(int(begin[best] - begin[cut])) <= most:
            out[i] = best
    return np.maximum.accumulate(out)


def _find_late(units: Sequence[Unit], order: Sequence[int], cuts: Sequence[int]) -> frozenset[int]:
    """Interleaved units with a file in which several workers write."""
    if len(cuts) < 3 or not any(_is_interleaved(u) for u in units):
        return frozenset()
    owner: dict[int, int] = {}
    shared: set[int] = set()
    for worker in range(len(cuts) - 1):
        for number in order[cuts[worker] : cuts[worker + 1]]:
            for file in units[number].files:
                if owner.setdefault(file, worker) != worker:
                    shared.add(file)
    return frozenset(
        n for n, unit in enumerate(units) if _is_interleaved(unit) and shared & {*unit.files}
    )
