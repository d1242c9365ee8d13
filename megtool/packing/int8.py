"""INT8: one signed byte an element, scaled by channel, by tensor or by group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.parts import Part
from megtool.packing.rounding import integer_codes


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """The integers as float32."""
    return values.view(np.int8).astype(np.float32)


def encoded(scaled: NDArray[np.float32], part: Part) -> NDArray[np.int8]:
    """The integers, -128 to 127, of values that have been divided by their scales."""
    return integer_codes(scaled, -128, 127)
