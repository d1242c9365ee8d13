"""MXFP4: FP4 codes, two a byte, and a power of two (E8M0) for every 32 of them (OCP MX)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.int4 import paired
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.number_formats.rounding import small_codes
from megtool.number_formats.small_floats import E2M1, four_bit_pairs
from megtool.number_formats.thread_buffers import scratch


def codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Codes along the last axis, low nibble first; blocks of 16 bytes in an axis of their own, as
    in gpt-oss (`[..., groups, 16]`), are joined to `[..., groups * 32]`."""
    if part.spans[-1].dim == WHOLE:
        values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
    return four_bit_pairs(values)


def encoded(
    scaled: NDArray[np.float32],
    part: PackedPart,
    out: NDArray[np.uint8],
    *,
    half_down: bool = False,
) -> None:
    """Put values `[rows, columns]` that have been divided by their scales to `out` (`[rows,
    columns / 2]`, any strides), two a byte; ties go to even, as OCP's specification has it."""
    room = scratch("codes", scaled.shape, np.uint8)
    paired(small_codes(scaled, E2M1, half_down=half_down, out=room), out)


def encoded_half_down(
    scaled: NDArray[np.float32], part: PackedPart, out: NDArray[np.uint8]
) -> None:
    """As `encoded`, with ties rounded towards zero and zero stored as minus zero, as modelopt's
    exporter does."""
    encoded(scaled, part, out, half_down=True)
