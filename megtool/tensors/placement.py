"""Placements: affine relations between a canonical tensor and a stored one.

A stored tensor may be the fusion, stack, transpose, permutation or padding of canonical tensors.
Each of these is the same thing: the canonical tensor, reshaped to finer dimensions, sits in the
stored tensor at an affine index,

    canonical.reshape(shape)[i_0, ..., i_k]  ==  stored[base + sum_j i_j * mult_j * e(dim_j)]

so one `Placement` says it for both directions, and composing two of them on the same canonical
tensor gives an n-d strided copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import MappingError
from megtool.tensors.box import Boxes, Ints, concatenate, numel, row_major_strides, strides
from megtool.tensors.grouping import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineView:
    """Elements of `shape` inside a stored tensor.

    Dimension `j` runs along dimension `dims[j]` of the stored tensor in steps of `mults[j]`, from
    index `base` (one entry per stored dimension). Stored elements are those of the view plus
    `shift`.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    mults: tuple[int, ...]
    base: tuple[int, ...]
    shift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(AffineView):
    """The location of `canonical`, reshaped to `shape`, inside `stored`."""

    canonical: str
    stored: str

    @classmethod
    def identity(cls, name: str, shape: Sequence[int], *, stored: str | None = None) -> Placement:
        """The placement of a canonical tensor that equals the stored one."""
        return cls(
            canonical=name,
            stored=stored or name,
            shape=tuple(shape),
            dims=tuple(range(len(shape))),
            mults=(1,) * len(shape),
            base=(0,) * len(shape),
        )

    @property
    def is_identity(self) -> bool:
        """Whether the stored tensor has the canonical one at the same indices."""
        n = len(self.shape)
        is_whole = self.dims == tuple(range(n)) and self.mults == (1,) * n
        return is_whole and self.base == (0,) * n and not self.shift


def refine(a: Placement, b: Placement) -> tuple[Placement, Placement]:
    """Both placements of one canonical tensor, rewritten over the same, finest common shape.

    Raises:
        MappingError: the two cut a dimension in ways that do not nest.
    """
    if a.shape == b.shape:
        return a, b
    if numel(a.shape) != numel(b.shape):
        raise MappingError(
            f"{a.canonical!r} has {numel(a.shape)} elements as {a.stored!r} "
            f"and {numel(b.shape)} as {b.stored!r}",
            tensor=a.canonical,
        )
    if numel(a.shape) == 0:
        raise MappingError("zero-size tensors are not refined", tensor=a.canonical)
    suffixes = sorted(_suffixes(a.shape) | _suffixes(b.shape), reverse=True)
    for outer, inner in pairwise(suffixes):
        if outer % inner:
            raise MappingError(
                f"{a.stored!r} and {b.stored!r} cut {a.canonical!r} as {a.shape} and {b.shape}, "
                "which do not nest",
                tensor=a.canonical,
            )
    return _recut(a, suffixes), _recut(b, suffixes)


def _suffixes(shape: Sequence[int]) -> set[int]:
    out, total = {1}, 1
    for n in reversed(shape):
        total *= n
        out.add(total)
    return out


def _recut(p: Placement, suffixes: list[int]) -> Placement:
    """The same placement over the dimensions that `suffixes` (products of trailing sizes) cut."""
    full_strides = strides(p.shape)
    shape, dims, mults = [], [], []
    for outer, inner in pairwise(suffixes):
        j = next(
            j
            for j in range(len(p.shape))
            if full_strides[j] <= inner and outer <= full_strides[j] * p.shape[j] and p.shape[j] > 1
        )
        shape.append(outer // inner)
        dims.append(p.dims[j])
        mults.append(p.mults[j] * (inner // full_strides[j]))
    return replace(p, shape=tuple(shape), dims=tuple(dims), mults=tuple(mults))


def place_in(stored: NDArray[Any], p: Placement) -> NDArray[Any]:
    """The elements of a stored array where `p` has a canonical tensor, as a view of its shape."""
    corner = stored[tuple(slice(n, None) for n in p.base)]
    steps = [m * stored.strides[d] for d, m in zip(p.dims, p.mults, strict=True)]
    return np.lib.stride_tricks.as_strided(corner, p.shape, steps)


def narrow(p: Placement, lo: Sequence[int], hi: Sequence[int]) -> Placement:
    """The placement of the box `lo:hi` of a view in the same stored tensor."""
    if tuple(hi) == p.shape and not any(lo):
        return p
    base = list(p.base)
    for i, d, m in zip(lo, p.dims, p.mults, strict=True):
        base[d] += i * m
    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
    return replace(p, shape=shape, base=tuple(base))


def pieces(p: Placement, boxes: Boxes) -> tuple[Ints, Boxes]:
    """The parts of the canonical tensor in shards of the stored one.

    `boxes` are the shards' boxes in the stored tensor. Returns the row of the shard and the box in
    the placement's view (`p.shape`), for every non-empty piece. A shard that cuts through a fused
    dimension (a query group, say) gives several.
    """
    rows = np.flatnonzero(boxes.filled) if 0 not in p.shape else np.zeros(0, np.int64)
    lo = np.zeros((len(rows), len(p.shape)), np.int64)
    hi = np.tile(np.array(p.shape, np.int64), (len(rows), 1)).reshape(lo.shape)
    for d in range(len(p.base)):
        along = [j for j in range(len(p.shape)) if p.dims[j] == d and p.shape[j] > 1]
        start, stop = boxes.lo[rows, d] - p.base[d], boxes.hi[rows, d] - p.base[d]
        if len(along) > 1:
            pick, lo, hi = _nested(p, sorted(along, key=lambda j: -p.mults[j]), start, stop, lo, hi)
        elif along:
            j, m = along[0], p.mults[along[0]]
            lo[:, j] = np.maximum(-(-start // m), 0)
            hi[:, j] = np.minimum(-(-stop // m), p.shape[j])
            pick = np.flatnonzero(lo[:, j] < hi[:, j])
            lo, hi = lo[pick], hi[pick]
        else:
            pick = np.flatnonzero((start <= 0) & (stop > 0))
            lo, hi = lo[pick], hi[pick]
        rows = rows[pick]
    return rows, Boxes(lo, hi)


def _nested(
    p: Placement, along: list[int], start: Ints, stop: Ints, lo: Ints, hi: Ints
) -> tuple[NDArray[np.int64], Ints, Ints]:
    """Several view dimensions share one stored dimension: each range yields a few boxes."""
    sizes, mults = [p.shape[j] for j in along], [p.mults[j] for j in along]
    ranges = np.stack([start, stop], 1)
    first, range_ids = grouped(ranges)
    lattices = [lattice_boxes(sizes, mults, int(a), int(b)) for a, b in ranges[first]]
    count = np.array([len(f) for f in lattices], np.int64)[range_ids]
    pick = np.repeat(np.arange(len(range_ids), dtype=np.int64), count)
    parts = (
        concatenate([lattices[w] for w in range_ids], len(along))
        if len(range_ids)
        else Boxes.of([], 1)
    )
    lo, hi = lo[pick], hi[pick]
    if len(pick):
        lo[:, along], hi[:, along] = parts.lo, parts.hi
    return pick, lo, hi


def lattice_boxes(sizes: Sequence[int], mults: Sequence[int], start: int, stop: int) -> Boxes:
    """Boxes of the indices `i` for which `start <= sum(i * mults) < stop`.

    `mults` fall, and each is at least the reach of all that follow (a mixed-radix number with
    gaps), as fusing and splitting dimensions always gives.
    """
    out: list[tuple[list[int], list[int]]] = []
    _lattice([], list(sizes), list(mults), start, stop, out)
    return Boxes.of(out, len(sizes))


def _lattice(
    head: list[int],
    sizes: list[int],
    mults: list[int],
    start: int,
    stop: int,
    out: list[tuple[list[int], list[int]]],
) -> None:
    if not sizes:
        if start <= 0 < stop:
            out.append((head, [x + 1 for x in head]))
        return
    reach = sum((n - 1) * m for n, m in zip(sizes[1:], mults[1:], strict=True))
    first_whole = max(-(-start // mults[0]), 0)
    end_whole = min((stop - 1 - reach) // mults[0] + 1, sizes[0])
    first = max(-(-(start - reach) // mults[0]), 0)
    end = min((stop - 1) // mults[0] + 1, sizes[0])
    i = first
    while i < end:
        if first_whole <= i < end_whole:
            ones = [x + 1 for x in head]
            out.append(([*head, i, *[0] * (len(sizes) - 1)], [*ones, end_whole, *sizes[1:]]))
            i = end_whole
        else:
            shift = i * mults[0]
            _lattice([*head, i], sizes[1:], mults[1:], start - shift, stop - shift, out)
            i += 1


def lattice(p: Placement, shard_lo: Ints, shard_hi: Ints, view_lo: Ints) -> tuple[Ints, Ints]:
    """The positions of view boxes in the row-major bytes of their shards, in elements.

    Row `i` is a view box that starts at `view_lo[i]` inside the shard `shard_lo[i]:shard_hi[i]` of
    the stored tensor. Returns the first element's position (int64 `[n]`) and the stride of every
    view dimension (int64 `[n, len(p.shape)]`).
    """
    step = row_major_strides(shard_hi - shard_lo)
    base = np.zeros(len(view_lo), np.int64)
    for d, b in enumerate(p.base):
        base += (b - shard_lo[:, d]) * step[:, d]
    stride = np.empty(view_lo.shape, np.int64)
    for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):
        stride[:, j] = m * step[:, d]
        base += view_lo[:, j] * stride[:, j]
    return base, stride
