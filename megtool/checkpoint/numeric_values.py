"""Values: the elements of any type as numbers that numpy computes with, exactly."""

from __future__ import annotations

from megtool.checkpoint.transport.strided import Array
from megtool.dtypes import DType
from megtool.number_formats.small_floats import eight_bit


def numbers(array: Array, kind: DType) -> Array:
    """What elements of type `kind`, as they lie in files, mean: no rounding, no torch.

    Numpy's own types stay as they are; bfloat16 and the 8-bit floats become float32.
    """
    if kind.name == "bfloat16":
        return (array.astype("<u4") << 16).view("<f4")
    if kind.is_float and kind.itemsize == 1:
        return eight_bit(kind.name)[array]
    return array.view(kind.view)
