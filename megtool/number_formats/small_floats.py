"""Conversion between small floats and float32: bfloat16 by shifts, narrower types by tables."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of an FP4 (E2M1) code mean; the fourth is the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloat:
    """A float type of few bits: torch's name for it, its largest finite value, its smallest normal
    one, and the bits after the point."""

    name: str
    largest: float
    smallest: float
    mantissa: int

    @property
    def lowest(self) -> int:
        """The exponent of `smallest`, a power of two."""
        return math.frexp(self.smallest)[1] - 1

    @property
    def last(self) -> int:
        """The code of `largest`."""
        share, exponent = math.frexp(self.largest)
        return (exponent - 1 - self.lowest << self.mantissa) + int(share * (2 << self.mantissa))


E4M3 = SmallFloat(name="float8_e4m3fn", largest=448.0, smallest=2.0**-6, mantissa=3)
E5M2 = SmallFloat(name="float8_e5m2", largest=57344.0, smallest=2.0**-14, mantissa=2)
E2M1 = SmallFloat(name="float4_e2m1fn", largest=6.0, smallest=1.0, mantissa=1)

SMALL = {kind.name: kind for kind in (E4M3, E5M2, E2M1)}
"""Those that are rounded to, by torch's name."""


def single(array: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Elements of type `name` (torch's), as they lie in files, as float32: exact, but for float64
    and for integers of more than 24 bits, which are rounded."""
    if name == "bfloat16":
        return (array.astype("<u4") << 16).view(np.float32)
    if name.startswith("float8"):
        return eight_bit_values(array, name)
    return array.astype(np.float32)


def eight_bit_values(array: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """What 8-bit floats mean, as float32, looked up two at a time where their number is even."""
    array = np.ascontiguousarray(array)
    if array.ndim and array.shape[-1] % 2 == 0:
        return looked_up(_two_bytes(name), array.view("<u2")).view(np.float32)
    out: NDArray[np.float32] = np.take(eight_bit(name), array)
    return out


@functools.cache
def _two_bytes(name: str) -> NDArray[np.uint64]:
    """Two values side by side, for all 65536 pairs of bytes (the second cache holds them)."""
    codes, values = np.arange(1 << 16), eight_bit(name)
    pairs = np.stack([values[codes & 255], values[codes >> 8]], axis=1)
    return np.ascontiguousarray(pairs).view(np.uint64).reshape(1 << 16)


@functools.cache
def eight_bit(name: str) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float type, by their bits."""
    bits = np.arange(256)
    if name == "float8_e8m0fnu":  # a power of two, without sign or mantissa
        powers: NDArray[np.float64] = np.ldexp(np.ones(256), bits - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    exponent_bits = 4 if "e4m3" in name else 5
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - (0 if name.endswith("fnuz") else 1)
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = bits & (1 << mantissa_bits) - 1
    leading = (exponent > 0).astype(int) << mantissa_bits  # absent from subnormal numbers
    out: NDArray[np.float64] = np.ldexp(
        (leading + mantissa) * 1.0, np.maximum(exponent, 1) - bias - mantissa_bits
    )
    out[128:] *= -1
    if name.endswith("fnuz"):
        out[128] = np.nan  # what would be minus zero is the only NaN
    elif name == "float8_e4m3fn":
        out[[127, 255]] = np.nan
    else:
        special = exponent == (1 << exponent_bits) - 1
        out[special & (mantissa > 0)] = np.nan
        out[special & (mantissa == 0)] = [np.inf, -np.inf]
    return out.astype(np.float32)


def four_bit_pairs(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """FP4 codes, two a byte along the last axis, low nibble first: `[..., n]` to `[..., 2n]`."""
    return looked_up(_pairs(), packed).view(np.float32)


def looked_up(table: NDArray[np.uint64], index: NDArray[Any]) -> NDArray[np.uint64]:
    """`table[index]`, in contiguous memory: `take` is several times faster, and unsigned indices
    that cannot miss need no check."""
    out: NDArray[np.uint64] = np.take(table, np.ascontiguousarray(index), mode="clip")
    return out


@functools.cache
def _pairs() -> NDArray[np.uint64]:
    """Both values of a byte side by side: one look-up for two elements."""
    values = np.array([*FP4, *(-x for x in FP4)], np.float32)
    byte = np.arange(256)
    table = np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    return np.ascontiguousarray(table).view(np.uint64).reshape(256)
