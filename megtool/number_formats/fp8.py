"""FP8: one 8-bit float per element, scaled by block, channel or tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.rounding import small_codes
from megtool.number_formats.small_floats import SMALL, eight_bit_values
from megtool.number_formats.thread_buffers import scratch


def codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """What the bytes mean before scaling (`part.dtype`: `float8_e4m3fn` or `float8_e5m2`)."""
    return eight_bit_values(values, part.dtype)


def encoded(scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.uint8]) -> None:
    """Put the bytes of values that have been divided by their scales, and are given up, to `out`
    (of their shape, any strides)."""
    kind = SMALL[part.dtype]
    if out.flags.c_contiguous:
        small_codes(scaled, kind, out=out)
        return
    room = scratch("codes", out.shape, np.uint8)
    np.copyto(out, small_codes(scaled, kind, out=room))
