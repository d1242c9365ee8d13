"""Many n-d half-open index ranges at once, as two integer arrays.

A box is `lo[d] <= index[d] < hi[d]` in every dimension. Shards, intersections and copies of a
checkpoint come by the million, so boxes are kept in columns and every operation here works on all
of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megtool.tensors.grouping import grouped

Ints = NDArray[np.int64]

_PAIRS_AT_A_TIME = 1 << 20
_CORNERS_AT_A_TIME = 1 << 19
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Boxes:
    """`len(self)` boxes of `ndim` dimensions: `lo` and `hi` are int64 `[n, ndim]`."""

    lo: Ints
    hi: Ints

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], ndim: int) -> Boxes:
        """Boxes from `(lo, hi)` pairs; `ndim` sets the width if there are none."""
        lo = np.array([p[0] for p in pairs], dtype=np.int64).reshape(len(pairs), ndim)
        hi = np.array([p[1] for p in pairs], dtype=np.int64).reshape(len(pairs), ndim)
        return cls(lo, hi)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Boxes:
        """One box: all of a tensor of `shape`."""
        return cls.of([([0] * len(shape), list(shape))], len(shape))

    def __len__(self) -> int:
        return int(self.lo.shape[0])

    def __getitem__(self, rows: NDArray[np.generic] | slice) -> Boxes:
        return Boxes(self.lo[rows], self.hi[rows])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return int(self.lo.shape[1])

    @property
    def shape(self) -> Ints:
        """Extent of every box in every dimension, int64 `[n, ndim]`."""
        return self.hi - self.lo

    @property
    def filled(self) -> NDArray[np.bool_]:
        """Which boxes hold an element, bool `[n]`; right even where `volume` would overflow."""
        return np.asarray((self.lo < self.hi).all(axis=1))

    def volume(self) -> Ints:
        """Number of elements in every box, int64 `[n]` (1 for 0-d boxes), if less than 2**63."""
        out = np.ones(len(self), np.int64)
        for d in range(self.ndim):
            out *= np.maximum(self.hi[:, d] - self.lo[:, d], 0)
        return out


def numel(shape: Sequence[int]) -> int:
    """Number of elements of a shape, exact however large."""
    out = 1
    for n in shape:
        out *= n
    return out


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    out = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        out[d] = out[d + 1] * shape[d + 1]
    return tuple(out)


def row_major_strides(shape: Ints) -> Ints:
    """Row-major strides of many shapes at once: int64 `[n, ndim]` to the same."""
    out = np.ones_like(shape)
    for d in range(shape.shape[1] - 2, -1, -1):
        out[:, d] = out[:, d + 1] * shape[:, d + 1]
    return out


def concatenate(parts: Sequence[Boxes], ndim: int) -> Boxes:
    """All boxes of `parts`, in order, with `ndim` dimensions.

    Those that a part lacks are 0 to 1 there; those that it has beyond are such padding, and go.
    """
    if not parts:
        return Boxes.of([], ndim)
    return Boxes(
        np.concatenate([_widened(p.lo, ndim, 0) for p in parts]),
        np.concatenate([_widened(p.hi, ndim, 1) for p in parts]),
    )


def _widened(ends: Ints, ndim: int, value: int) -> Ints:
    if ends.shape[1] >= ndim:
        return ends[:, :ndim]
    more = np.full((len(ends), ndim - ends.shape[1]), value, np.int64)
    return np.concatenate([ends, more], axis=1)


def intersect(a: Boxes, b: Boxes) -> Boxes:
    """Pairwise intersection of equally many boxes; empty ones get `hi == lo`."""
    lo = np.maximum(a.lo, b.lo)
    return Boxes(lo, np.maximum(np.minimum(a.hi, b.hi), lo))


def join(
    a: Boxes, b: Boxes, of_a: Ints | None = None, of_b: Ints | None = None
) -> tuple[Ints, Ints]:
    """All pairs `(i, j)` for which `a[i]` and `b[j]` share an element, ordered by `i`, then `j`.

    With `of_a` and `of_b` (int64, not negative) only boxes of the same group meet, so one call
    joins the boxes of many tensors. In each group the work goes along the dimension in which its
    `b` have the most distinct starts: candidates are a contiguous range of `b` sorted there, the
    rest is filtered. Time is O((n + m) log m + candidates), and memory is bounded whatever the
    number of candidates.
    """
    of_a = np.zeros(len(a), np.int64) if of_a is None else of_a
    of_b = np.zeros(len(b), np.int64) if of_b is None else of_b
    if not len(a) or not len(b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    (a_lo, a_hi), (b_lo, b_hi) = _on_a_line(a, b, of_a, of_b)
    order = np.argsort(b_lo, kind="stable")
    reach = np.maximum.accumulate(b_hi[order])
    first = np.searchsorted(reach, a_lo, side="right")
    last = np.searchsorted(b_lo[order], a_hi, side="left")
    count = np.maximum(last - first, 0)
    found_i, found_j = [], []
    for rows in _bounded(count):
        n = count[rows]
        i = np.repeat(np.arange(rows.start, rows.stop, dtype=np.int64), n)
        within = np.arange(len(i), dtype=np.int64) - np.repeat(np.cumsum(n) - n, n)
        j = order[np.repeat(first[rows], n) + within]
        keep = of_a[i] == of_b[j]
        for d in range(a.ndim):
            keep &= np.maximum(a.lo[i, d], b.lo[j, d]) < np.minimum(a.hi[i, d], b.hi[j, d])
        i, j = i[keep], j[keep]
        by = np.lexsort((j, i))
        found_i.append(i[by])
        found_j.append(j[by])
    return np.concatenate(found_i), np.concatenate(found_j)


_Intervals = tuple[Ints, Ints]


def _on_a_line(a: Boxes, b: Boxes, of_a: Ints, of_b: Ints) -> tuple[_Intervals, _Intervals]:
    """Every box as an interval of one line, group after group, so that boxes of one group share an
    element only if their intervals do, and intervals of different groups never meet."""
    groups = int(max(of_a.max(), of_b.max())) + 1
    best, most = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for d in range(b.ndim):
        order = np.lexsort((b.lo[:, d], of_b))
        group, start = of_b[order], b.lo[order, d]
        new = np.concatenate([[True], (group[1:] != group[:-1]) | (start[1:] != start[:-1])])
        starts = np.bincount(group[new], minlength=groups)
        best[starts > most] = d
        most = np.maximum(starts, most)
    ends = [np.zeros(len(of), np.int64) for of in (of_a, of_a, of_b, of_b)]
    if a.ndim:
        sides = ((a.lo, of_a), (a.hi, of_a), (b.lo, of_b), (b.hi, of_b))
        ends = [np.take_along_axis(x, best[of][:, None], axis=1)[:, 0] for x, of in sides]
    else:
        ends[1] += 1
        ends[3] += 1
    low = int(min(e.min() for e in ends))
    if (int(max(e.max() for e in ends)) - low + 1) * groups > _LARGEST:
        _, rank = grouped(np.concatenate(ends))
        ends = np.split(rank.reshape(-1).astype(np.int64), np.cumsum([len(e) for e in ends[:-1]]))
        low = 0
    span = int(max(e.max() for e in ends)) - low + 1
    a_lo, a_hi, b_lo, b_hi = (e - low for e in ends)
    return (
        (a_lo + of_a * span, np.maximum(a_hi, a_lo) + of_a * span),
        (b_lo + of_b * span, np.maximum(b_hi, b_lo) + of_b * span),
    )


def _bounded(count: Ints) -> Iterator[slice]:
    """Cut the rows into slices of at most about a million candidates each."""
    total = np.cumsum(count)
    begin = 0
    while begin < len(count):
        done = total[begin - 1] if begin else 0
        end = int(np.searchsorted(total, done + _PAIRS_AT_A_TIME, side="right"))
        end = max(end, begin + 1)
        yield slice(begin, end)
        begin = end


@dataclass(frozen=True, slots=True)
class CoverFault:
    """The first element, in row-major order, that boxes do not cover exactly once."""

    group: int
    index: tuple[int, ...]
    times: int

    @property
    def kind(self) -> str:
        """`hole` or `overlap`."""
        return "hole" if self.times == 0 else "overlap"


def cover_fault(boxes: Boxes, shapes: Ints, group: Ints | None = None) -> CoverFault | None:
    """Check that boxes tile their tensors: every element exactly once. None when they do.

    `group[i]` (ascending) says which row of `shapes` (int64 `[t, ndim]`) box `i` belongs to;
    without it there is one tensor. Boxes must lie inside their tensor (see `outside`).

    An indicator function of finite support is determined by its mixed difference, and that of a
    box is +1 and -1 at its 2^ndim corners. So the boxes cover every element exactly once if and
    only if their signed corners add up to the corners of the whole tensor: one sort, O(n log n).
    The first corner that does not cancel is the first element covered another number of times.
    """
    group = np.zeros(len(boxes), np.int64) if group is None else group
    cut = ~_held_whole(boxes, shapes, group)
    pending = np.flatnonzero(cut)
    rows = np.flatnonzero(cut[group])
    boxes, shapes, group = boxes[rows], shapes[pending], (np.cumsum(cut) - 1)[group[rows]]
    first = np.searchsorted(group, np.arange(len(shapes) + 1))
    at_a_time, begin = _CORNERS_AT_A_TIME >> min(boxes.ndim, 19), 0
    while begin < len(shapes):
        end = int(np.searchsorted(first, first[begin] + at_a_time, side="right")) - 1
        end = min(max(end, begin + 1), len(shapes), begin + at_a_time)
        part = slice(int(first[begin]), int(first[end]))
        fault = _cover_fault(boxes[part], shapes[begin:end], group[part] - begin)
        if fault:
            return CoverFault(int(pending[begin + fault.group]), fault.index, fault.times)
        begin = end
    return None


def _held_whole(boxes: Boxes, shapes: Ints, group: Ints) -> NDArray[np.bool_]:
    """Which tensors are plainly covered: by a single box that is all of them."""
    alone = np.bincount(group, minlength=len(shapes)) == 1
    rows = np.flatnonzero(alone[group])
    is_full = (boxes.lo[rows] == 0).all(axis=1) & (boxes.hi[rows] == shapes[group[rows]]).all(
        axis=1
    )
    out = np.zeros(len(shapes), bool)
    out[group[rows[is_full]]] = True
    return out


def _cover_fault(boxes: Boxes, shapes: Ints, group: Ints) -> CoverFault | None:
    inside = boxes.filled
    nonempty = np.flatnonzero((shapes > 0).all(axis=1))
    lo = np.concatenate([boxes.lo[inside], np.zeros((len(nonempty), boxes.ndim), np.int64)])
    hi = np.concatenate([boxes.hi[inside], shapes[nonempty]])
    of = np.concatenate([group[inside], nonempty])
    weight = np.ones(len(of), np.int64)
    weight[len(of) - len(nonempty) :] = -1
    if not len(of):
        return None
    cut = np.flatnonzero(((lo != 0) | (hi != shapes[of])).any(axis=0))
    lo, hi, ndim = lo[:, cut], hi[:, cut], len(cut)
    corner = np.arange(1 << ndim)
    sign = np.concatenate([-weight if c.bit_count() & 1 else weight for c in corner.tolist()])
    key = _keys(of, lo, hi)
    order = np.argsort(key)
    sorted_key, sign = key[order], sign[order]
    begin = np.flatnonzero(np.concatenate([[True], sorted_key[1:] != sorted_key[:-1]]))
    total = np.add.reduceat(sign, begin)
    wrong = np.flatnonzero(total)
    if not len(wrong):
        return None
    bits, row = divmod(int(order[begin[wrong[0]]]), len(of))
    index = [0] * boxes.ndim
    for k, d in enumerate(cut.tolist()):
        index[d] = int(hi[row, k] if bits >> k & 1 else lo[row, k])
    return CoverFault(int(of[row]), tuple(index), 1 + int(total[wrong[0]]))


def _keys(group: Ints, lo: Ints, hi: Ints) -> Ints:
    """One integer per corner of every box (corner by corner), in lexicographic order of
    `(group, index)`."""
    n, ndim = lo.shape
    extent = [int(group.max()) + 1, *(int(x) + 1 for x in hi.max(axis=0))]
    if numel(extent) < 1 << 63:
        step = strides(extent)
        key = np.tile(group * step[0], 1 << ndim).reshape(1 << ndim, n)
        for d in range(ndim):
            low, high = lo[:, d] * step[d + 1], hi[:, d] * step[d + 1]
            for corner in range(1 << ndim):
                key[corner] += high if corner >> d & 1 else low
        return key.reshape(-1)
    corners = [
        np.column_stack([group, *(hi[:, d] if c >> d & 1 else lo[:, d] for d in range(ndim))])
        for c in range(1 << ndim)
    ]
    points = np.concatenate(corners)
    order = np.lexsort(points.T[::-1])
    ranked = points[order]
    change = np.concatenate([[False], (ranked[1:] != ranked[:-1]).any(axis=1)])
    rank = np.empty(len(points), np.int64)
    rank[order] = np.cumsum(change)
    return rank


def outside(boxes: Boxes, shapes: Ints) -> Ints:
    """Rows of the boxes that are inverted or leave their tensor (`shapes` int64 `[n, ndim]`)."""
    bad = (boxes.lo < 0) | (boxes.hi < boxes.lo) | (boxes.hi > shapes)
    return np.flatnonzero(bad.any(axis=1))


def difference(lo: Sequence[int], hi: Sequence[int], holes: Boxes) -> Boxes:
    """The part of one box that none of `holes` covers, as disjoint boxes."""
    ndim = len(lo)
    remaining = [(tuple(lo), tuple(hi))] if all(x < y for x, y in zip(lo, hi, strict=True)) else []
    for h_lo, h_hi in zip(holes.lo.tolist(), holes.hi.tolist(), strict=True):
        remaining = [piece for box in remaining for piece in _minus(box, h_lo, h_hi)]
    return Boxes.of(remaining, ndim)


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _minus(box: _Box, h_lo: list[int], h_hi: list[int]) -> list[_Box]:
    """The difference of two boxes: at most two slabs per dimension; empty slabs are dropped."""
    lo, hi = list(box[0]), list(box[1])
    if any(max(lo[d], h_lo[d]) >= min(hi[d], h_hi[d]) for d in range(len(lo))):
        return [box]
    out: list[_Box] = []
    for d in range(len(lo)):
        if lo[d] < h_lo[d]:
            out.append((tuple(lo), (*hi[:d], h_lo[d], *hi[d + 1 :])))
            lo[d] = h_lo[d]
        if h_hi[d] < hi[d]:
            out.append(((*lo[:d], h_hi[d], *lo[d + 1 :]), tuple(hi)))
            hi[d] = h_hi[d]
    return out


def split(size: int, parts: int) -> list[tuple[int, int]]:
    """`[lo, hi)` of each of `parts` near-even pieces: the first `size % parts` are one longer."""
    base, extra = divmod(size, parts)
    cuts = [i * base + min(i, extra) for i in range(parts + 1)]
    return list(pairwise(cuts))


def from_flat(shape: Sequence[int], start: int, stop: int) -> Boxes:
    """The row-major range `[start, stop)` of a tensor as at most `2 * ndim - 1` boxes, in order.

    Each box is contiguous in row-major order, so consecutive boxes take consecutive bytes.
    """
    total = numel(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"flat range {start}:{stop} outside a tensor of {total} elements")
    out: list[tuple[list[int], list[int]]] = []
    if start < stop:
        _flat([], list(shape), start, stop, out)
    return Boxes.of(out, len(shape))


def _flat(
    head: list[int], tail: list[int], start: int, stop: int, out: list[tuple[list[int], list[int]]]
) -> None:
    if not tail:
        out.append((head, [x + 1 for x in head]))
        return
    inner = numel(tail[1:])
    first, a = divmod(start, inner)
    last, b = divmod(stop, inner)
    if first == last:
        _flat([*head, first], tail[1:], a, b, out)
        return
    if a:
        _flat([*head, first], tail[1:], a, inner, out)
        first += 1
    if first < last:
        ones = [x + 1 for x in head]
        out.append(([*head, first, *[0] * (len(tail) - 1)], [*ones, last, *tail[1:]]))
    if b:
        _flat([*head, last], tail[1:], 0, b, out)


def to_flat(shape: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> tuple[Ints, int]:
    """The row-major runs of one box: their starts (int64, ascending) and their common length."""
    ndim, step = len(shape), strides(shape)
    size = [h - x for x, h in zip(lo, hi, strict=True)]
    if any(n <= 0 for n in size):
        return np.zeros(0, np.int64), 0
    inner = ndim
    while inner > 0 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    starts = np.array([sum(x * s for x, s in zip(lo, step, strict=True))], np.int64)
    for d in range(inner):
        starts = (starts[:, None] + np.arange(size[d], dtype=np.int64) * step[d]).reshape(-1)
    return starts, numel(size[inner:])
