"""FP8: one float of 8 bits an element, scaled by block, by channel or by tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.floats import eight_bit_values
from megtool.packing.parts import Part
from megtool.packing.rounding import SMALL, small_codes


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """What the bytes mean before scaling (`part.dtype`: `float8_e4m3fn` or `float8_e5m2`)."""
    return eight_bit_values(values, part.dtype)


def encoded(scaled: NDArray[np.float32], part: Part) -> NDArray[np.uint8]:
    """The bytes of values that have been divided by their scales."""
    return small_codes(scaled, SMALL[part.dtype])
