"""NVFP4: FP4 codes, two a byte, an FP8 (E4M3) scale for every 16, and one global scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.int4 import paired
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.rounding import small_codes
from megtool.number_formats.small_floats import E2M1, four_bit_pairs
from megtool.number_formats.thread_buffers import scratch


def codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Codes along the last axis, low nibble first."""
    return four_bit_pairs(values)


def encoded(scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.uint8]) -> None:
    """Put values `[rows, columns]` that have been divided by their scales to `out` (`[rows,
    columns / 2]`, any strides), two a byte."""
    room = scratch("codes", scaled.shape, np.uint8)
    paired(small_codes(scaled, E2M1, out=room), out)
