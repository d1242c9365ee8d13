"""MXFP4: FP4 codes, two a byte, and a power of two (E8M0) for every 32 of them (OCP MX)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.floats import four_bit_pairs
from megtool.packing.parts import WHOLE, Part


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """Codes along the last axis, low nibble first; blocks of 16 bytes in an axis of their own, as
    in gpt-oss (`[..., groups, 16]`), are joined to `[..., groups * 32]`."""
    if part.spans[-1].dim == WHOLE:
        values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
    return four_bit_pairs(values)
