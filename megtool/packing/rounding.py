"""Float32 to small floats: rounded half to even, saturated, exact for every input.

All is done with whole-array arithmetic on bits. Adding the power of two whose last place is the
small type's step at a value makes the processor round the value as that type would: what it adds to
the sum's bits is the rounded value counted in steps. Values below the smallest normal number share
its step, so subnormal codes need no case of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError

_CHUNK = 1 << 15  # elements at a time: passes stay in the second cache and outlast their calls
_INFINITY = np.int32(0x7F800000)


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
    x: NDArray[np.float32], kind: SmallFloat, *, half_down: bool = False, short: bool = False
) -> NDArray[np.uint8]:
    """The codes of `x` (contiguous), one a byte: to the nearest, ties to even, and what lies beyond
    the largest value (infinity too) to that value.

    8-bit types keep the sign of zero and of NaN. FP4 has the sign bit below zero only, as NVIDIA
    ModelOpt and compressed-tensors have it. `half_down` rounds ties towards zero and gives zero
    the sign bit too. `short` promises that all of `x` have 8 significant bits or fewer, as
    bfloat16 over a power of two: they are looked up.

    Raises:
        FormatError: NaN, where the type has none.
    """
    out = np.empty(x.shape, np.uint8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    size = min(_CHUNK, max(1, flat.size))
    scratch = [np.empty(size, np.int32) for _ in range(3 * (not short))]
    index = np.empty(size if short else 0, np.intp)
    for begin in range(0, flat.size, size):
        part, into = flat[begin : begin + size], codes[begin : begin + size]
        if short and kind.nan is None and np.isnan(part.max()):
            raise FormatError("elements are NaN", hint="they cannot be quantised")
        if short:
            np.copyto(index[: part.size], part.view("<u2")[1::2])
            np.take(_by_upper_half(kind, half_down), index[: part.size], out=into, mode="clip")
        else:
            with np.errstate(invalid="ignore"):  # of NaN
                _round(part, into, kind, half_down, *(s[: part.size] for s in scratch))
        if kind.sign == 0x80:
            continue
        sign = (np.less_equal if half_down else np.less)(part, np.float32(0)).view(np.uint8)
        np.left_shift(sign, 3, out=sign)
        np.bitwise_or(into, sign, out=into)
    return out


@functools.cache
def _by_upper_half(kind: SmallFloat, half_down: bool) -> NDArray[np.uint8]:
    """Codes (of FP4 without signs) by the upper 16 bits of a float32, the lower ones being zero.
    Numbers that are too small for that have the code of zero whatever their bits."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    if kind.nan is None:
        x = np.nan_to_num(np.abs(x))
    out = np.empty(x.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        _round(x, out, kind, half_down, *(np.empty(x.shape, np.int32) for _ in range(3)))
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
    """The codes of `x`; those of FP4 without signs."""
    value, power = size.view(np.float32), total.view(np.float32)
    np.abs(x, out=value)
    top = value.max()  # NaN where there is one
    nans = np.isnan(x) if np.isnan(top) else None
    if nans is not None and kind.nan is None:
        raise FormatError("elements are NaN", hint="they cannot be quantised")
    if not top <= kind.largest:
        np.minimum(value, np.float32(kind.largest), out=value)
    # `step`: the exponent of each value, from that of the smallest normal number on.
    np.bitwise_and(size, _INFINITY, out=step)
    least = np.int32(kind.exponent << 23).view(np.float32)
    np.maximum(step.view(np.float32), least, out=step.view(np.float32))
    np.add(step, np.int32((23 - kind.mantissa) << 23), out=total)
    if half_down:
        up = _ties_rounded_up(value, power)
    np.add(value, power, out=power)
    np.right_shift(step, 23 - kind.mantissa, out=step)
    np.add(total, step, out=total)
    # Modulo 256: what the exponents add above the code, and the smallest one, fall away.
    np.copyto(out, total, casting="unsafe")
    np.subtract(out, np.uint8(kind.exponent << kind.mantissa & 0xFF), out=out)
    if half_down:
        np.subtract(out, up.view(np.uint8), out=out)
    if nans is not None and kind.nan is not None:
        out[nans] = kind.nan
    if kind.sign == 0x80:
        sign = np.signbit(x).view(np.uint8)
        np.left_shift(sign, 7, out=sign)
        np.bitwise_or(out, sign, out=out)


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

    Raises:
        FormatError: NaN.
    """
    out = np.empty(x.shape, np.int8)
    flat, codes = x.reshape(-1), out.reshape(-1)
    for begin in range(0, flat.size, _CHUNK):
        part: NDArray[Any] = flat[begin : begin + _CHUNK]
        top = part.max()
        if np.isnan(top):
            raise FormatError("elements are NaN", hint="they cannot be quantised")
        if not (top < high + 0.5 and part.min() >= low - 0.5):
            np.clip(part, np.float32(low), np.float32(high), out=part)
        part += np.float32(3 << 22)  # whose last place is 1: integers are left in the low bits
        np.copyto(codes[begin : begin + _CHUNK], part.view(np.int32), casting="unsafe")
    return out
