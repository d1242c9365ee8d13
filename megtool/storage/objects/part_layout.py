"""Cut an object into the parts in which it is uploaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.protocol import MAX_PART_BYTES, MAX_PARTS, MIN_PART_BYTES

PART_BYTES = 8 << 20
"""The size of a part, unless an object would have too many."""

LEAST_BYTES = MIN_PART_BYTES
"""The least size of a part that is not the last."""


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes `offset : offset + num_bytes` of an object that are bytes of another one."""

    offset: int
    num_bytes: int
    source: ObjectPath
    source_offset: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Parts of an object, in order: where each ends, and those that the server copies, by index."""

    ends: Sequence[int]
    copies: dict[int, CopyRun] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ends)

    def bounds(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends."""
        return (self.ends[part - 1] if part else 0), self.ends[part]

    def under(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """The parts that some bytes are in, each with the begin and the end of the overlap."""
        end = offset + num_bytes
        part = bisect_right(self.ends, offset)
        while offset < end:
            stop = min(end, self.ends[part])
            yield part, offset, stop
            offset, part = stop, part + 1


def cut_parts(size: int, runs: Sequence[CopyRun] = (), borders: Sequence[int] = ()) -> PartLayout:
    """Cut an object of `size` bytes into parts of about `PART_BYTES`.

    `runs`, in ascending order, are bytes that the server can copy: those that are as large as a
    part may be get parts of their own. Bytes between them that are too few for a part take some of
    the run that follows. At `borders`, ascending, others begin to write: a part ends there, unless
    it or the next one were too small.
    """
    part_bytes, least = max(PART_BYTES, LEAST_BYTES), LEAST_BYTES
    joined = _join(runs)
    while True:
        layout = _cut(size, joined, borders, part_bytes, least)
        if len(layout) <= MAX_PARTS:
            return layout
        part_bytes, least = 2 * part_bytes, 2 * least


def _cut(
    size: int, runs: Sequence[CopyRun], borders: Sequence[int], part_bytes: int, least: int
) -> PartLayout:
    ends: list[int] = []
    copies: dict[int, CopyRun] = {}
    done = 0

    def cut_between(begin: int, end: int) -> None:
        for border in borders[bisect_right(borders, begin) : bisect_right(borders, end)]:
            if border - begin >= least and (end - border >= least or end == size > border):
                _cut_evenly(ends, begin, border, part_bytes)
                begin = border
        _cut_evenly(ends, begin, end, part_bytes)

    for run in runs:
        begin = run.offset if run.offset == done else max(run.offset, done + least)
        if run.end - begin < least:
            continue  # its bytes pass through this process
        cut_between(done, begin)
        first = len(ends)
        _cut_evenly(ends, begin, run.end, MAX_PART_BYTES, is_limit=True)
        for part in range(first, len(ends)):
            a = ends[part - 1] if part else 0
            copies[part] = CopyRun(
                a, ends[part] - a, run.source, run.source_offset + a - run.offset
            )
        done = run.end
    cut_between(done, size)
    return PartLayout(ends, copies)


def _cut_evenly(
    ends: list[int], begin: int, end: int, part_bytes: int, *, is_limit: bool = False
) -> None:
    """Cut bytes into parts of at least (`is_limit`: at most) `part_bytes`."""
    if begin == end:
        return
    num_bytes = end - begin
    count = -(-num_bytes // part_bytes) if is_limit else max(1, num_bytes // part_bytes)
    ends += [begin + num_bytes * (n + 1) // count for n in range(count)]


def _join(runs: Sequence[CopyRun]) -> list[CopyRun]:
    """Runs that follow each other on both sides, as one."""
    out: list[CopyRun] = []
    for run in runs:
        last = out[-1] if out else None
        if (
            last is not None
            and last.source == run.source
            and last.end == run.offset
            and last.source_offset + last.num_bytes == run.source_offset
        ):
            out[-1] = CopyRun(
                last.offset, last.num_bytes + run.num_bytes, last.source, last.source_offset
            )
        else:
            out.append(run)
    return out


class Coverage:
    """Which bytes of a part are written, as sorted ranges that do not touch."""

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add bytes `begin:end`; they may be there already."""
        if self.ends and begin == self.ends[-1]:
            self.ends[-1] = end
            return
        first = bisect_right(self.ends, begin - 1)
        last = bisect_right(self.begins, end)
        if first < last:
            begin, end = min(begin, self.begins[first]), max(end, self.ends[last - 1])
        self.begins[first:last] = [begin]
        self.ends[first:last] = [end]

    def holds(self, begin: int, end: int) -> bool:
        """Whether all bytes `begin:end` are in it."""
        row = bisect_right(self.begins, begin) - 1
        return begin >= end or (row >= 0 and self.ends[row] >= end)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges between two offsets."""
        for row in range(bisect_right(self.ends, begin), len(self.begins)):
            if self.begins[row] >= end:
                return
            yield max(begin, self.begins[row]), min(end, self.ends[row])
