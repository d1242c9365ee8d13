"""A box of elements cut into chunks of bounded size, each with its codes and scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.thread_buffers import CHUNK, scratch

Slab = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

_VECTOR = 32  # rows under one row of scales from which it pays to spread that over the columns


def slabs(
    values: NDArray[Any], by: NDArray[Any], codes: PackedPart, out: NDArray[Any]
) -> Iterator[Slab]:
    """Matrices `[rows, columns]` of `values`, in turn, with what they are divided by (`[rows or
    1 or blocks of rows, blocks of columns or 1]`) and where their codes lie in `out`.

    `by` has an axis for every dimension of `values`: 1, or the number of equal blocks in it.
    """
    served = {s.dim: s.per for s in codes.spans}
    last = values.ndim - 1
    high, wide = served.get(last - 1, 1), served.get(last, 1)
    by = np.broadcast_to(by, (*values.shape[:-2], *by.shape[-2:]))
    for lead in np.ndindex(values.shape[:-2]):
        box, under, into = values[lead], by[lead], out[lead]
        rows, columns = box.shape
        # A block of rows or columns, and a byte or word, stay whole.
        block = [n // m if m > 1 else 1 for n, m in zip(box.shape, under.shape, strict=True)]
        low = [math.lcm(block[0], high), math.lcm(block[1], wide)]
        step_r = max(CHUNK // columns // low[0], 1) * low[0]
        step_c = columns
        if step_r * columns > CHUNK:
            step_c = max(CHUNK // step_r // low[1], 1) * low[1]
        for r in range(0, rows, step_r):
            for c in range(0, columns, step_c):
                r_end, c_end = min(r + step_r, rows), min(c + step_c, columns)
                over = _span(r, r_end, block[0], under.shape[0])
                along = _span(c, c_end, block[1], under.shape[1])
                yield (
                    box[r:r_end, c:c_end],
                    under[over, along],
                    into[r // high : -(-r_end // high), c // wide : -(-c_end // wide)],
                )


def _span(begin: int, end: int, block: int, count: int) -> slice:
    return slice(begin // block, end // block) if count > 1 else slice(None)


def divided(values: NDArray[Any], dtype: str, by: NDArray[np.float32]) -> NDArray[np.float32]:
    """The elements of a slab over their scales, in this thread's own memory (contiguous), until
    the next slab's."""
    out = scratch("quotient", values.shape, np.float32)
    if dtype == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, values)
        np.left_shift(bits, np.uint32(16), out=bits)
        values = out
    elif dtype == "float16":
        np.copyto(out, values)
        values = out
    rows, columns = out.shape
    high, wide = rows // by.shape[0], columns // by.shape[1]
    if by.shape[1] > 1 and high >= _VECTOR:
        by, wide = np.repeat(by, wide, axis=1), 1
    shape = (by.shape[0], high, by.shape[1], columns // by.shape[1])
    np.divide(values.reshape(shape), by[:, None, :, None], out=out.reshape(shape))
    return out
