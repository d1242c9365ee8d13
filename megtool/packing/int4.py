"""INT4: two integers a byte, in 32-bit words along the columns or in bytes along the rows.

Words are compressed-tensors' `pack-quantized` (also of 8 bits): element `i` of a row is bits
`i * bits` and up of the row, plus half the range, so that none is negative. Row pairs are
modelopt's `W4A16_AWQ`: byte `[r, c]` holds rows `2r` (low) and `2r + 1`, in two's complement.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.floats import looked_up
from megtool.packing.parts import Index, Part, Span
from megtool.packing.rounding import integer_codes


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """Integers in int32 words along the last axis, of 32 / `per` bits each, less half the range."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    if part.spans[-1].per == 4:
        return raw.astype(np.float32) - np.float32(128)
    return looked_up(_offset_pairs(), raw).view(np.float32)


def codes_of_row_pairs(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """Two rows a byte: `[..., r, c]` to `[..., 2r, c]`."""
    out = np.empty((*values.shape[:-2], values.shape[-2] * 2, values.shape[-1]), np.float32)
    signed = values.view(np.int8)
    out[..., 1::2, :] = signed >> 4
    out[..., 0::2, :] = np.left_shift(signed, 4) >> 4
    return out


def unpacked_zeros(
    values: NDArray[Any], part: Part, lo: Index, hi: Index
) -> tuple[NDArray[np.int8], Part]:
    """Zero points in int32 words along the rows, one a row: `[n, groups]` of `lo:hi`, and how
    they lie then."""
    per = part.spans[0].per
    bits = 32 // per
    words = values.view(np.uint32)
    shifts = np.arange(per, dtype=np.uint32)[:, None] * np.uint32(bits)
    all_rows = (words[:, None, :] >> shifts) & np.uint32((1 << bits) - 1)
    rows = all_rows.reshape(-1, words.shape[1]).astype(np.int16) - (1 << (bits - 1))
    dim = part.spans[0].dim
    begin = lo[dim] % per
    kept = rows[begin : begin + hi[dim] - lo[dim]].astype(np.int8)
    spans = (Span(dim), *part.spans[1:])
    return kept, replace(part, dtype="int8", shape=kept.shape, spans=spans)


@functools.cache
def _offset_pairs() -> NDArray[np.uint64]:
    byte = np.arange(256)
    both = np.stack([(byte & 15) - 8, (byte >> 4) - 8], axis=1).astype(np.float32)
    return np.ascontiguousarray(both).view(np.uint64).reshape(256)


def encoded(scaled: NDArray[np.float32], part: Part) -> NDArray[np.int32]:
    """Values divided by their scales, as integers in int32 words along the last axis; what a last
    word has left over is zero."""
    per = part.spans[-1].per
    half = 1 << (32 // per - 1)
    whole = integer_codes(scaled, -half, half - 1).view(np.uint8)
    whole += np.uint8(half)
    if over := -whole.shape[-1] % per:
        whole = np.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, over)])
    return (whole if per == 4 else paired(whole)).view("<i4")


def encoded_row_pairs(scaled: NDArray[np.float32], part: Part) -> NDArray[np.uint8]:
    """Values divided by their scales, as integers two rows a byte: `[..., 2r, c]` to
    `[..., r, c]`."""
    whole = integer_codes(scaled, -8, 7).view(np.uint8)
    out: NDArray[np.uint8] = np.left_shift(whole[..., 1::2, :], 4)
    out |= whole[..., 0::2, :] & np.uint8(15)
    return out


def paired(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes of four bits a byte along the last axis, the first in the low bits."""
    both = np.ascontiguousarray(nibbles).view("<u2")
    out: NDArray[np.uint8] = (both | both >> 4).astype(np.uint8)
    return out
