"""Proof that placements claim every element of their stored tensors, and none twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CoverageError, MappingError
from megtool.tensors.box import Boxes, Ints, cover_fault, join
from megtool.tensors.grouping import distinct, grouped
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

_MAX_CACHED_CLAIMS = 4096

_Steps = tuple[tuple[int, int], ...]
_Axis = tuple[int, _Steps]


def check_placements(
    tensors: Sequence[GlobalTensor], placements: Iterable[Placement], *, complete: bool
) -> None:
    """Check that every stored element is claimed at most once; with `complete`, exactly once.

    Along each dimension a placement claims a set of indices, and in the tensor the product of
    these sets. If all sets are ranges, claims are boxes and are checked as such. Otherwise (query
    groups, transposed permutations) indices of a dimension that belong to the same sets are
    interchangeable, so counting the claims on one index of each class is enough.

    Raises:
        CoverageError: names the tensor, an element, and how often it is claimed.
        MappingError: a placement and its stored tensor have different numbers of dimensions.
    """
    by_stored = defaultdict(list)
    for p in placements:
        if 0 not in p.shape:
            by_stored[p.stored].append(p)
    views: dict[object, _Claim] = {}
    proved = set[object]()
    for tensor in tensors:
        placed = by_stored.get(tensor.name, [])
        if 0 in tensor.shape or not (placed or complete):
            continue
        if len(placed) == 1 and placed[0].is_identity and placed[0].shape == tensor.shape:
            continue
        claims = [_claim(p, tensor, views) for p in placed]
        base = np.array([p.base for p in placed], np.int64).reshape(len(placed), len(tensor.shape))
        signature = (tensor.shape, tuple(map(id, claims)), base.tobytes())
        if (
            len(claims) < _MAX_CACHED_CLAIMS and signature in proved
        ):  # another layer with the same placements
            continue
        _check(tensor, placed, claims, base, complete)
        proved.add(signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """The indices that placements of one view claim along each stored dimension, from their base.

    `steps` are ascending `(count, step)` pairs, consecutive ones merged; `end` is the last index.
    """

    steps: tuple[_Steps, ...]
    end: tuple[int, ...]

    @property
    def is_box(self) -> bool:
        """The claim is a range of indices in every dimension."""
        return all(not s or (len(s) == 1 and s[0][1] == 1) for s in self.steps)


def _claim(p: Placement, tensor: GlobalTensor, views: dict[object, _Claim]) -> _Claim:
    ndim = len(tensor.shape)
    if len(p.base) != ndim:
        raise MappingError(
            f"the mapping places {p.canonical!r} at {list(p.base)} of a tensor of shape "
            f"{list(tensor.shape)}",
            tensor=tensor.name,
        )
    key = (p.shape, p.dims, p.mults, ndim)
    if key not in views:
        along: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
        for n, d, m in sorted(zip(p.shape, p.dims, p.mults, strict=True), key=lambda x: x[2]):
            if n > 1 and along[d] and along[d][-1][0] * along[d][-1][1] == m:
                along[d][-1] = (along[d][-1][0] * n, along[d][-1][1])
            elif n > 1:
                along[d].append((n, m))
        views[key] = _Claim(
            steps=tuple(tuple(a) for a in along),
            end=tuple(sum((n - 1) * m for n, m in a) for a in along),
        )
    return views[key]


def _check(
    tensor: GlobalTensor,
    placed: Sequence[Placement],
    claims: Sequence[_Claim],
    base: Ints,
    complete: bool,
) -> None:
    end = base + np.array([c.end for c in claims], np.int64).reshape(base.shape)
    is_outside = (base < 0) | (end >= np.array(tensor.shape, np.int64))
    for row, d in np.argwhere(is_outside)[:1].tolist():
        raise CoverageError(
            f"the mapping of {placed[row].canonical!r} reaches indices {int(base[row, d])} to "
            f"{int(end[row, d])} of a dimension of {tensor.shape[d]}",
            tensor=tensor.name,
        )
    if all(c.is_box for c in {id(c): c for c in claims}.values()):
        _check_boxes(tensor, Boxes(base, end + 1), complete)
    else:
        bases = base.tolist()
        axes = [tuple(zip(bases[k], c.steps, strict=True)) for k, c in enumerate(claims)]
        _check_classes(tensor, axes, complete)


def _check_boxes(tensor: GlobalTensor, boxes: Boxes, complete: bool) -> None:
    if complete:
        fault = cover_fault(boxes, np.array([tensor.shape], np.int64).reshape(1, boxes.ndim))
        if fault:
            raise _claim_error(tensor, fault.index, fault.times)
        return
    i, j = join(boxes, boxes)
    for k in np.flatnonzero(i < j)[:1].tolist():
        element = np.maximum(boxes.lo[i[k]], boxes.lo[j[k]])
        times = int(((boxes.lo <= element) & (element < boxes.hi)).all(axis=1).sum())
        raise _claim_error(tensor, element.tolist(), times)


def _check_classes(
    tensor: GlobalTensor, claims: Sequence[tuple[_Axis, ...]], complete: bool
) -> None:
    classes, members = [], []
    for d, size in enumerate(tensor.shape):
        axes = sorted({c[d] for c in claims})
        begin, masks = _masks(axes, size, tensor)
        first, label = grouped(np.packbits(masks, axis=0).T)
        segments = [distinct(label[m]) for m in masks]
        number = {a: k for k, a in enumerate(axes)}
        classes.append(begin[first])
        members.append([segments[number[c[d]]] for c in claims])
    count = np.zeros([len(c) for c in classes], np.int32)
    for k in range(len(claims)):
        count[np.ix_(*[m[k] for m in members])] += 1
    wrong = np.argwhere(count != 1 if complete else count > 1)
    if len(wrong):
        element = [int(classes[d][i]) for d, i in enumerate(wrong[0])]
        raise _claim_error(tensor, element, int(count[tuple(wrong[0])]))


def _masks(
    axes: Sequence[_Axis], size: int, tensor: GlobalTensor
) -> tuple[Ints, NDArray[np.bool_]]:
    """Cut a dimension where a claim begins or ends. Returns the starts of the segments, and the
    segments that each axis claims, bool `[axes, segments]`."""
    runs = [_runs(a) for a in axes]
    cuts = distinct(np.concatenate([[0, size], *(np.concatenate([s, s + n]) for s, n in runs)]))
    masks = np.zeros((len(axes), len(cuts) - 1), bool)
    for row, (start, length) in enumerate(runs):
        delta = np.zeros(len(cuts), np.int64)
        np.add.at(delta, np.searchsorted(cuts, start), 1)
        np.add.at(delta, np.searchsorted(cuts, start + length), -1)
        claimed = np.cumsum(delta)[:-1]
        if (claimed > 1).any():
            raise CoverageError("the mapping claims an index twice", tensor=tensor.name)
        masks[row] = claimed > 0
    return cuts[:-1].astype(np.int64), masks


def _runs(axis: _Axis) -> tuple[Ints, int]:
    """The indices an axis claims, as starts of ranges and their common length."""
    base, steps = axis
    start, length = np.array([base], np.int64), 1
    for n, m in steps:
        if m == 1 and length == 1:
            length = n
        else:
            start = (start[:, None] + np.arange(n, dtype=np.int64) * m).reshape(-1)
    return start, length


def _claim_error(tensor: GlobalTensor, element: Sequence[int], times: int) -> CoverageError:
    return CoverageError(
        f"element {list(element)} is claimed {times} times by the mapping", tensor=tensor.name
    )
