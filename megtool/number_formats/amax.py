"""The amax under each scale of a box, computed so that tiles combine into a tensor.

Magnitudes of floats sort as their bits without the sign do, so the search runs over integers as
wide as the elements; NaN sorts above infinity and so is never lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart
from megtool.number_formats.small_floats import single
from megtool.number_formats.thread_buffers import CHUNK, scratch

_SHORT = 128
"""Runs of fewer elements are laid side by side, as a pass over each takes longer to begin."""

_WORDS: Mapping[int, str] = {8: "u8", 4: "u4", 2: "u2"}
_WIDE: Mapping[int, str] = {16: "c16", **_WORDS}
"""Types by their bytes, as which elements are moved several at a time."""


def amax(
    values: NDArray[Any], dtype: str, part: PackedPart, lo: Index, hi: Index
) -> NDArray[np.float32]:
    """The largest magnitudes of a box, as float32 in the shape of `part`'s window of it.

    `values` are the elements `lo:hi` of type `dtype` (torch's; float32, float16 or bfloat16) as
    `DType.view` holds them. They may end within a block, of which this is then a share: merge it.
    """
    first, end = part.window(lo, hi)
    window = tuple(b - a for a, b in zip(first, end, strict=True))
    out = np.zeros(window, np.float32)
    named = {s.dim: s.per for s in part.spans if s.dim != WHOLE}
    row = math.prod(values.shape[1:])
    block = named.get(0, 1)
    step = max(CHUNK // max(row, 1) // block, 1) * block
    begin = lo[0] if lo else 0
    while lo and begin < hi[0]:
        stop = min(hi[0], (begin // block) * block + step)
        some_lo, some_hi = (begin, *lo[1:]), (stop, *hi[1:])
        some = values[begin - lo[0] : stop - lo[0]]
        window_lo, window_hi = part.window(some_lo, some_hi)
        index = tuple(
            slice(a - f, b - f) for a, b, f in zip(window_lo, window_hi, first, strict=True)
        )
        current = out[index]
        maxima = _tops(some, dtype, named, some_lo, some_hi).reshape(current.shape)
        out[index] = np.maximum(current, maxima)
        begin = stop
    return out


def _tops(
    values: NDArray[Any], dtype: str, named: Mapping[int, int], lo: Index, hi: Index
) -> NDArray[np.float32]:
    """The largest magnitudes of a few rows: an axis a dimension, of 1 where none is `named`."""
    sizes = magnitudes(values, dtype)
    for d in range(sizes.ndim):
        per = named.get(d)
        if per is None:
            sizes = np.maximum.reduce(sizes, axis=d, keepdims=True, initial=0)
        elif per > 1:
            sizes = _by_block(sizes, d, per, lo[d], hi[d])
    return values_of(sizes, dtype)


def _by_block(sizes: NDArray[Any], dim: int, per: int, lo: int, hi: int) -> NDArray[Any]:
    shape = sizes.shape
    if lo % per or (hi - lo) % per:
        borders = [0, *range(per - lo % per, hi - lo, per)]
        cut: NDArray[Any] = np.maximum.reduceat(sizes, borders, axis=dim)
        return cut
    if dim == len(shape) - 1 and per < _SHORT:
        return folded(sizes.reshape(-1), per).reshape(*shape[:-1], shape[-1] // per)
    blocked = sizes.reshape(*shape[:dim], shape[dim] // per, per, *shape[dim + 1 :])
    out: NDArray[Any] = np.maximum.reduce(blocked, axis=dim + 1)
    return out


def magnitudes(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The bits of floats without their signs, contiguous, valid until this thread's next call.

    Raises:
        UsageError: `dtype` is none that is encoded from.
    """
    if dtype == "float32":
        out = scratch("magnitudes", values.shape, np.uint32)
        np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFFFF), out=out)
        return out
    if dtype in ("bfloat16", "float16"):
        out = scratch("magnitudes", values.shape, np.uint16)
        np.bitwise_and(values.view(np.uint16), np.uint16(0x7FFF), out=out)
        return out
    raise UsageError(
        f"elements of {dtype} are not encoded", hint="cast to float32, float16 or bfloat16 first"
    )


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """What bits without signs mean."""
    if dtype == "float32":
        return bits.view(np.float32)
    return single(bits.view(np.float16) if dtype == "float16" else bits, dtype)


def merge(
    total: NDArray[np.float32], update: NDArray[np.float32], part: PackedPart, lo: Index, hi: Index
) -> None:
    """Merge what `amax` computed for `lo:hi` into `total` (of `part`'s shape, zeros at first)."""
    first, end = part.window(lo, hi)
    index: Sequence[slice] = [slice(a, b) for a, b in zip(first, end, strict=True)]
    window = total[tuple(index)] if index else total
    np.maximum(window, update, out=window)


def folded(sizes: NDArray[Any], per: int) -> NDArray[Any]:
    """The maximum of every `per` consecutive elements (contiguous).

    Short runs are laid side by side, 16 bytes at a time, so that all passes are over long rows;
    within a word they are compared with themselves, shifted.
    """
    size, kind = sizes.itemsize, sizes.dtype
    while per > 1:
        if word := _WORDS.get(per * size):
            return _largest_in(sizes.view(word), kind)
        width = next((w for w in _WIDE if w < per * size and per * size % w == 0), size)
        lanes = per * size // width
        moved = scratch("lanes", (lanes, sizes.size // per), _WIDE.get(width, kind))
        np.copyto(moved, sizes.view(moved.dtype).reshape(-1, lanes).T)
        per = width // size
        sizes = np.maximum.reduce(moved.view(kind), axis=0)
    return sizes


def _largest_in(words: NDArray[Any], kind: np.dtype[Any]) -> NDArray[Any]:
    """The largest of the unsigned numbers of type `kind` in each word."""
    half = words.itemsize * 4
    while half >= kind.itemsize * 8:
        shifted = np.right_shift(words, words.dtype.type(half))
        words = np.maximum(words.view(kind), shifted.view(kind)).view(words.dtype)
        half //= 2
    return words.astype(kind)
