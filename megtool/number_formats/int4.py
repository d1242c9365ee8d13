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

from megtool.number_formats.packed_parts import Index, PackedPart, PartSpan
from megtool.number_formats.rounding import integer_codes
from megtool.number_formats.small_floats import looked_up
from megtool.number_formats.thread_buffers import scratch


def codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Integers in int32 words along the last axis, of 32 / `per` bits each, less half the range."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    if part.spans[-1].per == 4:
        return raw.astype(np.float32) - np.float32(128)
    return looked_up(_offset_pairs(), raw).view(np.float32)


def codes_of_row_pairs(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Two rows a byte: `[..., r, c]` to `[..., 2r, c]`."""
    out = np.empty((*values.shape[:-2], values.shape[-2] * 2, values.shape[-1]), np.float32)
    signed = values.view(np.int8)
    out[..., 1::2, :] = signed >> 4
    out[..., 0::2, :] = np.left_shift(signed, 4) >> 4
    return out


def unpacked_zeros(
    values: NDArray[Any], part: PackedPart, lo: Index, hi: Index
) -> tuple[NDArray[np.int8], PackedPart]:
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
    window = rows[begin : begin + hi[dim] - lo[dim]].astype(np.int8)
    spans = (PartSpan(dim), *part.spans[1:])
    return window, replace(part, dtype="int8", shape=window.shape, spans=spans)


@functools.cache
def _offset_pairs() -> NDArray[np.uint64]:
    byte = np.arange(256)
    pairs = np.stack([(byte & 15) - 8, (byte >> 4) - 8], axis=1).astype(np.float32)
    return np.ascontiguousarray(pairs).view(np.uint64).reshape(256)


def encoded(scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.int32]) -> None:
    """Put values `[rows, columns]`, divided by their scales and given up, to `out` (`[rows,
    words]`, any strides) as integers in int32 words; what a last word has left over is zero."""
    per = part.spans[-1].per
    half = 1 << (32 // per - 1)
    room = scratch("codes", scaled.shape, np.int8)
    codes = integer_codes(scaled, -half, half - 1, room).view(np.uint8)
    np.add(codes, np.uint8(half), out=codes)
    if over := -codes.shape[-1] % per:
        codes = np.pad(codes, [(0, 0), (0, over)])
    if per == 4:
        np.copyto(out, codes.view("<i4"))
    else:
        room = scratch("packed", (codes.shape[0], codes.shape[1] // 2), np.uint8)
        paired(codes, room)
        np.copyto(out, room.view("<i4"))


def encoded_row_pairs(
    scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.uint8]
) -> None:
    """Put values `[2r, columns]`, divided by their scales and given up, to `out` (`[r, columns]`,
    any strides) as integers, two rows a byte."""
    room = scratch("codes", scaled.shape, np.int8)
    codes = integer_codes(scaled, -8, 7, room).view(np.uint8)
    low = scratch("packed", out.shape, np.uint8)
    np.bitwise_and(codes[0::2], np.uint8(15), out=low)
    high = np.multiply(codes[1::2], np.uint8(16), out=codes[1::2])  # a shift is slower by far
    np.bitwise_or(low, high, out=out)


def paired(nibbles: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Put codes of four bits (contiguous) to `out` (any strides), two a byte along the last axis,
    the first in the low bits."""
    words = nibbles.view("<u2")
    moved = np.right_shift(words, np.uint16(4), out=scratch("pairs", words.shape, np.uint16))
    np.bitwise_or(words, moved, out=moved)
    np.copyto(out, moved, casting="unsafe")
