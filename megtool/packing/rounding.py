"""Float32 to small floats and integers: rounded half to even, saturated, exact for every input.

FP8 is torch's own cast, one pass, where torch is loaded, and numpy's arithmetic with the same bits
where it is not: its import costs as much as two billion elements. FP4 counts the borders between
its eight values that a magnitude lies beyond; integers are what adding the power of two whose last
place is 1 leaves in the low bits.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.packing.floats import E2M1 as FP4
from megtool.packing.scratch import CHUNK, scratch

_SERIAL = 1 << 15  # elements up to which torch shares out no work among threads of its own
_PLANES = 1 << 16  # elements of FP4 at a time: seven bytes each are held


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloat:
    """A float type of few bits: torch's name for it, its largest finite value, its smallest normal
    one, and the bits after the point."""

    name: str
    largest: float
    smallest: float
    mantissa: int


E4M3 = SmallFloat(name="float8_e4m3fn", largest=448.0, smallest=2.0**-6, mantissa=3)
E5M2 = SmallFloat(name="float8_e5m2", largest=57344.0, smallest=2.0**-14, mantissa=2)
E2M1 = SmallFloat(name="float4_e2m1fn", largest=6.0, smallest=1.0, mantissa=1)

SMALL = {kind.name: kind for kind in (E4M3, E5M2, E2M1)}
"""Those that `small_codes` rounds to, by torch's name."""


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
    size = CHUNK if kind is not E2M1 else _PLANES
    for begin in range(0, flat.size, size):
        part, into = flat[begin : begin + size], codes[begin : begin + size]
        if kind is E2M1:
            _four_bits(part, into, half_down)
        else:
            cast = _cast_by_torch if "torch" in sys.modules else cast_by_numpy
            cast(part, kind, into)
    return out


def _cast_by_torch(x: NDArray[np.float32], kind: SmallFloat, out: NDArray[np.uint8]) -> None:
    import torch

    target = torch.from_numpy(out).view(getattr(torch, kind.name))
    for begin in range(0, x.size, _SERIAL):
        part = x[begin : begin + _SERIAL]
        clipped = scratch("clipped", part.size, np.float32)
        part.clip(-kind.largest, kind.largest, out=clipped)
        target[begin : begin + _SERIAL].copy_(torch.from_numpy(clipped))


def cast_by_numpy(x: NDArray[np.float32], kind: SmallFloat, out: NDArray[np.uint8]) -> None:
    """Put the codes of an 8-bit type for `x` (contiguous, `[n]`) to `out`.

    A magnitude is added to the power of two whose last place is the type's step there: the
    processor rounds it, and the low bits of the sum are how many steps it is. The exponent above
    them says how many codes come before.
    """
    places = 23 - kind.mantissa
    spare = np.float32(kind.largest * (1 + 2.0 ** -(kind.mantissa + 2)))  # rounded down to that
    low, high = (np.float32(v).view(np.uint32) for v in (kind.smallest, kind.largest))
    before = np.uint8((((int(low) >> 23) + places) << kind.mantissa) & 0xFF)
    for begin in range(0, x.size, _SERIAL):
        part, codes = x[begin : begin + _SERIAL], out[begin : begin + _SERIAL]
        size = scratch("size", part.size, np.float32)
        power = scratch("power", part.size, np.float32)
        more = scratch("more", part.size, np.uint8)
        bits, steps = size.view(np.uint32), power.view(np.uint32)
        np.bitwise_and(part.view(np.uint32), np.uint32(0x7FFFFFFF), out=bits)
        beyond = bits.max() > spare.view(np.uint32)
        is_nan = np.isnan(size) if beyond else None
        if beyond:
            np.fmin(size, np.float32(kind.largest), out=size)
        np.bitwise_and(bits, np.uint32(0x7F800000), out=steps)
        steps.clip(low, high, out=steps)
        np.add(steps, np.uint32(places << 23), out=steps)
        np.add(size, power, out=size)
        np.copyto(codes, bits, casting="unsafe")
        np.right_shift(bits, np.uint32(places), out=bits)
        np.copyto(more, bits, casting="unsafe")
        np.add(codes, more, out=codes)
        np.subtract(codes, before, out=codes)
        np.signbit(part, out=more.view(np.bool_))
        np.multiply(more, np.uint8(0x80), out=more)  # a shift is slower by far
        np.add(codes, more, out=codes)
        if is_nan is not None:
            codes[is_nan] |= np.uint8(0x7F)


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
        raise FormatError("elements are NaN", hint="they cannot be quantised")
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
    for begin in range(0, x.size, _SERIAL):
        part = flat[begin : begin + _SERIAL]
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
            raise FormatError("elements are NaN", hint="they cannot be quantised")
        if not (top < high + 0.5 and part.min() >= low - 0.5):
            part.clip(low, high, out=part)
        part += np.float32(3 << 22)  # whose last place is 1: integers are left in the low bits
        np.copyto(codes[begin : begin + CHUNK], part.view(np.int32), casting="unsafe")
    return out
