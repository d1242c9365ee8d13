"""Float32 to small floats: rounded half to even, saturated, exact for every input.

All is done with whole-array arithmetic on bits. Adding the power of two whose last place is the
small type's step at a value makes the processor round the value as that type would: what it adds to
the sum's bits is the rounded value counted in steps. Values below the smallest normal number share
its step, so subnormal codes need no case of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 14  # elements at a time, so that the passes stay in the first cache
_INFINITY = np.int32(0x7F800000)
_ABS = np.int32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloat:
    """A float type of few bits: how many its mantissa has, the (float32) exponent of its smallest
    normal number, its largest finite value and the code of NaN without its sign."""

    mantissa: int
    exponent: int
    largest: float
    nan: int | None
    sign: int


E4M3 = SmallFloat(mantissa=3, exponent=127 - 6, largest=448.0, nan=0x7F, sign=0x80)
E5M2 = SmallFloat(mantissa=2, exponent=127 - 14, largest=57344.0, nan=0x7F, sign=0x80)
E2M1 = SmallFloat(mantissa=1, exponent=127, largest=6.0, nan=None, sign=0x08)

SMALL = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float4_e2m1fn": E2M1}
"""Those that `small_codes` rounds to, by torch's name."""


def small_codes(
    x: NDArray[np.float32], kind: SmallFloat, *, half_down: bool = False
) -> NDArray[np.uint8]:
    """The codes of `x` (contiguous), one a byte: to the nearest, ties to even, and what lies beyond
    the largest value (infinity too) to that value. NaN keeps its sign.

    A type without NaN gives NaN the code 0: see to it before. Its zero and what rounds to zero
    have the sign bit only below zero, as NVIDIA ModelOpt and compressed-tensors have it, while
    8-bit types keep minus zero. `half_down` rounds ties towards zero instead.
    """
    out = np.empty(x.shape, np.uint8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    size = min(_CHUNK, max(1, flat.size))
    scratch = [np.empty(size, np.int32) for _ in range(3)]
    for begin in range(0, flat.size, size):
        part = flat[begin : begin + size]
        _round(
            part, codes[begin : begin + size], kind, half_down, *(s[: part.size] for s in scratch)
        )
    return out


def _round(
    x: NDArray[np.float32],
    out: NDArray[np.uint8],
    kind: SmallFloat,
    half_down: bool,
    size: NDArray[np.int32],
    step: NDArray[np.int32],
    total: NDArray[np.int32],
) -> None:
    bits = x.view(np.int32)
    np.bitwise_and(bits, _ABS, out=size)
    top = int(size.max())
    largest = np.float32(kind.largest).view(np.int32)
    nans = size > _INFINITY if top > _INFINITY else None
    if top > largest:
        np.minimum(size, largest, out=size)  # of numbers above zero, bits sort as values
    # `step`: the exponent of each value, from that of the smallest normal number on.
    np.bitwise_and(size, _INFINITY, out=step)
    np.maximum(step, np.int32(kind.exponent << 23), out=step)
    np.add(step, np.int32((23 - kind.mantissa) << 23), out=total)
    value, power = size.view(np.float32), total.view(np.float32)
    if half_down:
        up = _ties_rounded_up(value, power)
    np.add(value, power, out=power)
    np.right_shift(step, 23 - kind.mantissa, out=step)
    np.add(total, step, out=total)
    if kind.sign == 0x80:
        np.right_shift(bits, 24, out=step)
        np.bitwise_and(step, np.int32(0x80), out=step)
        np.add(total, step, out=total)
    # Modulo 256: what the exponents add above the code, and the smallest one, fall away.
    np.copyto(out, total, casting="unsafe")
    np.subtract(out, np.uint8(kind.exponent << kind.mantissa & 0xFF), out=out)
    if half_down:
        np.subtract(out, up.view(np.uint8), out=out)
    if kind.sign != 0x80:
        below = np.less(x, np.float32(0)).view(np.uint8)
        np.left_shift(below, 3, out=below)
        np.bitwise_or(out, below, out=out)
    if nans is not None:
        if kind.nan is None:
            out[nans] = 0
        else:
            out[nans] = kind.nan | ((bits[nans] >> 24) & 0x80)


def _ties_rounded_up(value: NDArray[np.float32], power: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which of `value` lie midway between two steps and go to the upper one by the even rule."""
    upward = value + power
    upward -= power
    upward -= value
    upward *= np.float32(1 << 24)  # half a step is this much smaller than the power
    ties: NDArray[np.bool_] = np.equal(upward, power)
    return ties


def to_bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to bfloat16 (half to even), as float32, in place. NaN stays NaN."""
    bits = x.view(np.uint32)
    nans = np.isnan(x)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    odd += np.uint32(0x7FFF)
    bits += odd
    bits &= np.uint32(0xFFFF0000)
    if nans.any():
        x[nans] = np.nan
    return x


def rounded(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """`x` rounded to the wider type `name` (torch's), as float32; it may be overwritten."""
    if name == "bfloat16":
        return to_bfloat16(x)
    if name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return x


def integer_codes(x: NDArray[np.float32], low: int, high: int) -> NDArray[np.int8]:
    """`x` (contiguous, overwritten) rounded half to even and saturated to `low..high`.

    NaN becomes 0: see to it before.
    """
    out = np.empty(x.shape, np.int8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    for begin in range(0, flat.size, _CHUNK):
        part: NDArray[Any] = flat[begin : begin + _CHUNK]
        np.clip(part, np.float32(low), np.float32(high), out=part)
        part += np.float32(3 << 22)  # whose last place is 1: integers are left in the low bits
        np.copyto(codes[begin : begin + _CHUNK], part.view(np.int32), casting="unsafe")
    return out
