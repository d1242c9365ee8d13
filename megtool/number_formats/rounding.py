"""Rounding of float32 to small floats and integers: half to even, saturated, exact.

FP8 is told by `fp8_bits`. FP4 counts the borders between its eight values that a magnitude lies
beyond; integers are what adding the power of two whose last place is 1 leaves in the low bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.number_formats import fp8_bits
from megtool.number_formats.small_floats import E2M1, FP4, SmallFloat
from megtool.number_formats.thread_buffers import CHUNK, scratch

_PLANES = 1 << 18  # elements of FP4 at a time: seven bytes each are held


def small_codes(
    x: NDArray[np.float32],
    kind: SmallFloat,
    *,
    half_down: bool = False,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """The codes of `x` (contiguous), one a byte: to the nearest, ties to even, and what lies beyond
    the largest value (infinity too) to that value.

    8-bit types keep the sign of zero and of NaN. FP4 has the sign bit below zero only, as NVIDIA
    ModelOpt and compressed-tensors have it; with `half_down`, its ties are rounded towards zero and
    zero has the sign bit too. `out` (contiguous) is where codes go.

    Raises:
        FormatError: NaN, where the type has none.
    """
    if out is None:
        out = np.empty(x.shape, np.uint8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    if kind is not E2M1:
        fp8_bits.cast(flat, kind, codes)
        return out
    for begin in range(0, flat.size, _PLANES):
        _four_bits(flat[begin : begin + _PLANES], codes[begin : begin + _PLANES], half_down)
    return out


@functools.cache
def _borders(half_down: bool) -> NDArray[np.float32]:
    """What a magnitude must be larger than to have the next code of FP4: the middle between two
    values or, where that itself is rounded up, the number before it."""
    values = np.array(FP4, np.float32)
    middle = (values[1:] + values[:-1]) / np.float32(2)
    if not half_down:
        middle[1::2] = np.nextafter(middle[1::2], np.float32(0))
    out: NDArray[np.float32] = middle[:, None]
    return out


def _four_bits(x: NDArray[np.float32], out: NDArray[np.uint8], half_down: bool) -> None:
    value = scratch("magnitude", x.size, np.float32)
    beyond = scratch("beyond", (len(FP4) - 1, x.size), np.bool_)
    sign = scratch("sign", x.size, np.bool_)
    np.abs(x, out=value)
    if np.isnan(value.max()):
        raise FormatError(
            "elements are NaN", hint="they cannot be quantized", error_id="nan-weights"
        )
    np.greater(value, _borders(half_down), out=beyond)
    np.add.reduce(beyond.view(np.uint8), axis=0, dtype=np.uint8, out=out)
    (np.less_equal if half_down else np.less)(x, np.float32(0), out=sign)
    eight = np.multiply(sign.view(np.uint8), np.uint8(8), out=sign.view(np.uint8))
    np.bitwise_or(out, eight, out=out)


def rounded(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """`x` (contiguous) rounded to the wider type `name` (torch's: bfloat16 or float16; any other
    leaves it as it is), as float32, in place. NaN stays NaN."""
    if name == "float16":
        with np.errstate(over="ignore"):
            np.copyto(x, x.astype(np.float16))
    if name != "bfloat16":
        return x
    flat = x.reshape(-1)
    for begin in range(0, x.size, CHUNK):
        part = flat[begin : begin + CHUNK]
        is_nan = np.isnan(part) if np.isnan(part.max()) else None
        bits = part.view(np.uint32)
        last = scratch("last", part.size, np.uint32)
        np.right_shift(bits, np.uint32(16), out=last)
        np.bitwise_and(last, np.uint32(1), out=last)
        np.add(last, np.uint32(0x7FFF), out=last)  # half, or a little less where that is even
        np.add(bits, last, out=bits)
        np.bitwise_and(bits, np.uint32(0xFFFF0000), out=bits)
        if is_nan is not None:
            part[is_nan] = np.nan
    return x


def integer_codes(
    x: NDArray[np.float32], low: int, high: int, out: NDArray[np.int8] | None = None
) -> NDArray[np.int8]:
    """`x` (contiguous, overwritten) rounded half to even and saturated to `low..high`.

    Raises:
        FormatError: NaN.
    """
    if out is None:
        out = np.empty(x.shape, np.int8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    for begin in range(0, flat.size, CHUNK):
        part: NDArray[Any] = flat[begin : begin + CHUNK]
        top = part.max()
        if np.isnan(top):
            raise FormatError(
                "elements are NaN", hint="they cannot be quantized", error_id="nan-weights"
            )
        if not (top < high + 0.5 and part.min() >= low - 0.5):
            part.clip(low, high, out=part)
        part += np.float32(3 << 22)  # whose last place is 1: integers are left in the low bits
        np.copyto(codes[begin : begin + CHUNK], part.view(np.int32), casting="unsafe")
    return out
