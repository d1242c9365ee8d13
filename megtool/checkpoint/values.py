"""Values: the elements of any type as numbers that numpy computes with, exactly."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.transport.strided import Array
from megtool.dtypes import DType


def numbers(array: Array, kind: DType) -> Array:
    """What elements of type `kind`, as they lie in files, mean: no rounding, no torch.

    Numpy's own types stay as they are; bfloat16 and the 8-bit floats become float32.
    """
    if kind.name == "bfloat16":
        return (array.astype("<u4") << 16).view("<f4")
    if kind.is_float and kind.itemsize == 1:
        return eight_bit(kind.name)[array]
    return array.view(kind.view)


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
