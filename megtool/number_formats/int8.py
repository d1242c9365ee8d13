"""INT8: one signed byte per element, scaled by channel, tensor or group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.rounding import integer_codes
from megtool.number_formats.thread_buffers import scratch


def codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """The integers as float32."""
    return values.view(np.int8).astype(np.float32)


def encoded(scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.int8]) -> None:
    """Put the integers, -128 to 127, of values that have been divided by their scales, and are
    given up, to `out` (of their shape, any strides)."""
    room = scratch("codes", out.shape, np.int8)
    np.copyto(out, integer_codes(scaled, -128, 127, room))
