"""FP8 codes by integer arithmetic on the bits of wider floats.

Sign, exponent and first bits after the point of a number, rounded, are its code, but for a count of
binades: wherever the code is a normal number, and that is almost everywhere in what was scaled to
FP8's range. The few others are told apart, and cast one by one. A power of two as the scale is one
more count of binades, so that bfloat16 needs no float at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.amax import folded
from megtool.number_formats.small_floats import SmallFloat, single
from megtool.number_formats.thread_buffers import CHUNK, scratch

Bytes = NDArray[np.uint8]
Bits = NDArray[np.uint16]

_FEW = 16  # of so many numbers one may be cast by itself
_PIECE = 1 << 15  # numbers that are cast by floats at once, where there are more of them
_RUN = 512  # numbers that are looked through at once
_ONE = 127  # the bits of the exponent of 1


def cast(x: NDArray[np.float32], kind: SmallFloat, out: Bytes) -> None:
    """Put the codes of an 8-bit type for `x` (contiguous, `[n]`) to `out`: to the nearest, ties to
    even, saturated; signs of zero and NaN are kept."""
    spare = 23 - kind.mantissa
    less = np.uint32((_ONE + kind.lowest << 23) - _half(spare))
    for begin in range(0, x.size, CHUNK):
        part, codes = x[begin : begin + CHUNK], out[begin : begin + CHUNK]
        bits = scratch("eight", part.shape, np.uint16)
        np.copyto(bits, _rounded(part.view(np.uint32), spare, less), casting="unsafe")
        wrong = _coded(bits, kind, codes)
        if np.count_nonzero(wrong) * _FEW > part.size:
            for start in range(0, part.size, _PIECE):
                codes[start : start + _PIECE] = _cast_any(part[start : start + _PIECE], kind)
        else:
            few = _places(wrong)
            codes[few] = _cast_any(part[few], kind)


def cast_to_powers(values: Bits, block: int, kind: SmallFloat, out: Bytes) -> Bytes | None:
    """Put the codes of bfloat16 bits `[rows, columns]` to `out`, each `block` of columns (a
    multiple of 8) over the power of two that `scales.modelopt_exponent` has for it; returns these.

    None, and nothing there to be used, where only floats will do: for NaN and infinity, and many
    numbers that have no normal code.
    """
    rows, columns = values.shape
    exponents = np.empty((rows, columns // block), np.uint8)
    step = max(1, CHUNK // columns)
    for r in range(0, rows, step):
        some, into = values[r : r + step], out[r : r + step]
        if not _over_powers(some, exponents[r : r + step], kind, into):
            return None
    return exponents


def _over_powers(values: Bits, exponents: Bytes, kind: SmallFloat, out: Bytes) -> bool:
    """Fill `exponents` and `out` of some rows."""
    shape, block = values.shape, values.shape[1] // exponents.shape[1]
    largest = int(np.float32(kind.largest).view(np.uint32)) >> 16
    power, binades = (largest >> 7) - _ONE, scratch("binades", shape, np.uint8)
    # Beyond the largest code's share of a binade, a number is taken for one of the next.
    shifted = scratch("other", shape, np.uint16)
    np.add(values, np.uint16(0x7F - (largest & 0x7F)), out=shifted)
    np.right_shift(shifted, np.uint16(7), out=shifted)
    np.copyto(binades, shifted, casting="unsafe")  # and no sign
    top = folded(binades.reshape(-1), block).reshape(exponents.shape)
    np.subtract(np.maximum(top, np.uint8(power)), np.uint8(power), out=exponents)
    first = exponents.astype(np.int16) + np.int16(kind.lowest)
    if top.max() == 0xFF:
        return False
    # In blocks of zeros, and of numbers near the smallest, all are taken for too small.
    second = np.where(first < 1, 128, first + 1).astype(np.uint64)
    second *= np.uint64(0x0101_0101_0101_0101)
    start = np.repeat(second, block // 8, axis=1).view(np.uint8)
    wrong = scratch("wrong", shape, np.bool_)
    np.subtract(binades, start, out=binades)
    np.greater(binades, np.uint8(power - kind.lowest - 1), out=wrong)
    if np.count_nonzero(wrong) * _FEW > values.size:
        return False

    spare = 7 - kind.mantissa
    _low_bytes(_rounded(values, spare, np.uint16(-_half(spare) & 0xFFFF)), kind, out)
    np.multiply(start, np.uint8(1 << kind.mantissa), out=start)
    np.subtract(out, start, out=out)
    np.add(out, np.uint8(2 << kind.mantissa), out=out)

    r, c = np.divmod(_places(wrong), shape[1])
    x = single(values[r, c], "bfloat16")
    if not np.isfinite(x).all():
        return False
    out[r, c] = _cast_any(x / single(exponents[r, c // block], "float8_e8m0fnu"), kind)
    return True


def _half(spare: int) -> int:
    """What is added, and 1 where the bit above is set, before `spare` bits are dropped."""
    return (1 << spare - 1) - 1


def _rounded(bits: NDArray[Any], spare: int, less: Any) -> NDArray[Any]:
    """Bits of floats without the last `spare`, rounded half to even, after `less` is taken from
    them and `_half(spare)` is not."""
    kind = bits.dtype.type
    out: NDArray[Any] = scratch("rounded", bits.shape, kind)
    np.right_shift(bits, kind(spare), out=out)
    np.bitwise_and(out, kind(1), out=out)
    np.add(out, bits, out=out)
    np.subtract(out, less, out=out)
    np.right_shift(out, kind(spare), out=out)
    return out


def _coded(bits: Bits, kind: SmallFloat, out: Bytes) -> NDArray[np.bool_]:
    """Put to `out` the codes of rounded bits, counted from the smallest normal number's; returns
    which have no normal code, and a wrong one now."""
    first, unsigned = 1 << kind.mantissa, 8 - kind.mantissa
    shifted = scratch("other", bits.shape, np.uint16)
    wrong = scratch("wrong", bits.shape, np.bool_)
    np.left_shift(bits, np.uint16(unsigned), out=shifted)
    np.greater(shifted, np.uint16(kind.last - first << unsigned), out=wrong)
    _low_bytes(bits, kind, out)
    np.add(out, np.uint8(first), out=out)
    return wrong


def _low_bytes(bits: Bits, kind: SmallFloat, out: Bytes) -> None:
    """Put to `out` the low seven of rounded bits, and their sign."""
    shifted = scratch("other", bits.shape, np.uint16)
    np.right_shift(bits, np.uint16(1 + kind.mantissa), out=shifted)
    np.bitwise_and(shifted, np.uint16(0x80), out=shifted)
    np.add(shifted, bits, out=shifted)
    np.copyto(out, shifted, casting="unsafe")


def _places(yes: NDArray[np.bool_]) -> NDArray[np.intp]:
    """`np.flatnonzero`, several times faster where little is."""
    flat = yes.reshape(-1)
    num_in_runs = flat.size // _RUN * _RUN
    runs = flat[:num_in_runs].reshape(-1, _RUN)
    hit = np.flatnonzero(np.bitwise_or.reduce(runs.view(np.uint64), axis=1))
    run, offset = np.divmod(np.flatnonzero(runs[hit]), _RUN)
    return np.concatenate(
        [hit[run] * _RUN + offset, num_in_runs + np.flatnonzero(flat[num_in_runs:])]
    )


def _cast_any(x: NDArray[np.float32], kind: SmallFloat) -> Bytes:
    """The codes that `cast` has, for any numbers.

    A magnitude is added to the power of two whose last place is the type's step there: the
    processor rounds it, and the low bits of the sum are how many steps it is. The exponent above
    them says how many codes come before.
    """
    places = 23 - kind.mantissa
    low, high = (np.float32(v).view(np.uint32) for v in (kind.smallest, kind.largest))
    before = np.uint8((((int(low) >> 23) + places) << kind.mantissa) & 0xFF)
    size = np.abs(x)
    is_nan = np.isnan(size)
    np.fmin(size, np.float32(kind.largest), out=size)
    power = (size.view(np.uint32) & np.uint32(0x7F800000)).clip(low, high)
    power += np.uint32(places << 23)
    size += power.view(np.float32)
    bits = size.view(np.uint32)
    out = bits.astype(np.uint8)
    out += (bits >> np.uint32(places)).astype(np.uint8)
    out -= before
    out += np.signbit(x).view(np.uint8) * np.uint8(0x80)
    out[is_nan] |= np.uint8(0x7F)
    return out
