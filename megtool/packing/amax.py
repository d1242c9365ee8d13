"""Amax: the largest magnitude under each scale of a box, so that tiles add up to a tensor.

Magnitudes of floats sort as their bits without the sign do, so the search runs over integers as
wide as the elements; NaN sorts above infinity and so is never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError
from megtool.packing.floats import single
from megtool.packing.parts import WHOLE, Index, Part

SHORT = 64
"""Blocks of fewer columns are handled with the columns of all blocks side by side."""


def amax(values: NDArray[Any], dtype: str, part: Part, lo: Index, hi: Index) -> NDArray[np.float32]:
    """The largest magnitudes of a box, as float32 in the shape of `part`'s window of it.

    `values` are the elements `lo:hi` of type `dtype` (torch's; float32, float16 or bfloat16) as
    `DType.view` holds them. They may end within a block, of which this is then a share: merge it.
    """
    sizes = magnitudes(values, dtype)
    first, end = part.window(lo, hi)
    window = tuple(b - a for a, b in zip(first, end, strict=True))
    named = {s.dim: s.per for s in part.spans if s.dim != WHOLE}
    if not named:
        top = np.maximum.reduce(sizes, axis=None, initial=0)
        return values_of(np.asarray(top, sizes.dtype), dtype).reshape(window)
    for d in reversed(range(sizes.ndim)):
        per = named.get(d)
        if per is None:
            sizes = np.maximum.reduce(sizes, axis=d, keepdims=True, initial=0)
        elif per > 1:
            sizes = _by_block(sizes, d, per, lo[d], hi[d])
    return values_of(sizes, dtype).reshape(window)


def _by_block(sizes: NDArray[Any], dim: int, per: int, lo: int, hi: int) -> NDArray[Any]:
    shape = sizes.shape
    if lo % per or (hi - lo) % per:
        borders = [0, *range(per - lo % per, hi - lo, per)]
        cut: NDArray[Any] = np.maximum.reduceat(sizes, borders, axis=dim)
        return cut
    if dim == len(shape) - 1 and per < SHORT:
        lanes = np.ascontiguousarray(sizes.reshape(-1, per).T)
        found: NDArray[Any] = np.maximum.reduce(lanes, axis=0)
        return found.reshape(*shape[:-1], shape[-1] // per)
    whole = sizes.reshape(*shape[:dim], shape[dim] // per, per, *shape[dim + 1 :])
    out: NDArray[Any] = np.maximum.reduce(whole, axis=dim + 1)
    return out


def magnitudes(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The bits of floats without their signs.

    Raises:
        UsageError: `dtype` is none that is encoded from.
    """
    if dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    if dtype in ("bfloat16", "float16"):
        return np.ascontiguousarray(values).view(np.uint16) & np.uint16(0x7FFF)
    raise UsageError(
        f"elements of {dtype} are not encoded", hint="cast to float32, float16 or bfloat16 first"
    )


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """What bits without signs mean."""
    if dtype == "float32":
        return bits.view(np.float32)
    return single(bits.view(np.float16) if dtype == "float16" else bits, dtype)


def merge(
    total: NDArray[np.float32], found: NDArray[np.float32], part: Part, lo: Index, hi: Index
) -> None:
    """Let `total` (of `part`'s shape, zeros at first) know what `amax` found in `lo:hi`."""
    first, end = part.window(lo, hi)
    index: Sequence[slice] = [slice(a, b) for a, b in zip(first, end, strict=True)]
    window = total[tuple(index)] if index else total
    np.maximum(window, found, out=window)
