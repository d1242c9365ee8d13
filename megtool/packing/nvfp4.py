"""NVFP4: FP4 codes, two a byte, a scale in FP8 (E4M3) for every 16, and one more a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.floats import four_bit_pairs
from megtool.packing.mxfp4 import paired_lanes
from megtool.packing.parts import Part
from megtool.packing.rounding import E2M1, small_codes


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """Codes along the last axis, low nibble first."""
    return four_bit_pairs(values)


def encoded_lanes(lanes: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Divided values as codes, two a byte: `[16, blocks]` to `[blocks, 8]`."""
    return paired_lanes(small_codes(lanes, E2M1))
