"""Packed tensors as parts: which box of each part a box of elements needs.

A quantized tensor lies in several arrays: codes, scales, perhaps zero points. Each array's
dimensions say which elements an index of theirs serves (`Span`), so any box of elements can be
decoded from boxes of the parts, however large the tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.small_floats import single

Index = tuple[int, ...]

_WORTH_A_LOOP = 64  # elements: shorter runs under one scale are multiplied faster by a copy of it

WHOLE = -1
"""The `dim` of a span that every element needs all of."""


@dataclass(frozen=True, slots=True)
class PartSpan:
    """One dimension of a part: index `i` covers `i * per : (i + 1) * per` of `dim`."""

    dim: int
    per: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPart:
    """One array of a packed tensor. `dtype` is what its elements mean (torch's name)."""

    role: str
    dtype: str
    shape: Index
    spans: tuple[PartSpan, ...]

    def window(self, lo: Sequence[int], hi: Sequence[int]) -> tuple[Index, Index]:
        """The box of this array that the elements `lo:hi` need."""
        first, end = [], []
        for n, s in zip(self.shape, self.spans, strict=True):
            first.append(0 if s.dim == WHOLE else lo[s.dim] // s.per)
            end.append(n if s.dim == WHOLE else -(-hi[s.dim] // s.per))
        return tuple(first), tuple(end)

    @property
    def order(self) -> Index:
        """The tensor's dimensions in the order of this array."""
        return tuple(s.dim for s in self.spans if s.dim != WHOLE)


def trimmed(values: NDArray[Any], part: PackedPart, lo: Index, hi: Index) -> NDArray[Any]:
    """Codes unpacked from a window, one axis a dimension in `part.order`, without what the window
    holds beyond `lo:hi`."""
    index = []
    for s in part.spans:
        if s.dim != WHOLE:
            begin = lo[s.dim] % s.per
            index.append(slice(begin, begin + hi[s.dim] - lo[s.dim]))
    return values[tuple(index)]


def factors(
    values: NDArray[Any], part: PackedPart, lo: Index, hi: Index, order: Index
) -> tuple[NDArray[np.float32], int]:
    """A window of scales as float32, its axes in `order`, those the scale lacks of length 1.

    All axes but the last are as long as the box; what one index of the last one serves is told
    beside it (0 where it has been spread or is of length 1).
    """
    named = {s.dim: s for s in part.spans if s.dim != WHOLE}
    dims = [s.dim for s in part.spans if s.dim != WHOLE]
    array = single(values, part.dtype).reshape(
        [n for n, s in zip(values.shape, part.spans, strict=True) if s.dim != WHOLE]
    )
    array = array.transpose([dims.index(d) for d in order if d in named])
    array = array.reshape([array.shape[_rank(order, d, named)] if d in named else 1 for d in order])
    for axis, d in enumerate(order):
        if d not in named or named[d].per == 1:
            continue
        per, n = named[d].per, hi[d] - lo[d]
        last = axis == len(order) - 1
        if last and per >= _WORTH_A_LOOP and lo[d] % per == 0 and n % per == 0:
            return array, per
        begin = lo[d] % per
        array = np.repeat(array, per, axis=axis)
        array = array[(slice(None),) * axis + (slice(begin, begin + n),)]
    return array, 0


def _rank(order: Index, dim: int, named: dict[int, PartSpan]) -> int:
    return [d for d in order if d in named].index(dim)


def scale(
    out: NDArray[np.float32], by: NDArray[np.float32], per: int, *, shift: bool = False
) -> None:
    """Multiply `out` by the result of `factors` (or, with `shift`, subtract it), in place."""
    if per:
        out = out.reshape(*out.shape[:-1], out.shape[-1] // per, per)
        by = by[..., None]
    if shift:
        np.subtract(out, by, out=out)
    else:
        np.multiply(out, by, out=out)


def volume(lo: Sequence[int], hi: Sequence[int]) -> int:
    """Elements of a box."""
    return math.prod(b - a for a, b in zip(lo, hi, strict=True))
