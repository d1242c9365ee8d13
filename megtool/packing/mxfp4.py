"""MXFP4: FP4 codes, two a byte, and a power of two (E8M0) for every 32 of them (OCP MX)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.packing.floats import four_bit_pairs
from megtool.packing.parts import WHOLE, Part
from megtool.packing.rounding import E2M1, small_codes


def codes(values: NDArray[Any], part: Part) -> NDArray[np.float32]:
    """Codes along the last axis, low nibble first; blocks of 16 bytes in an axis of their own, as
    in gpt-oss (`[..., groups, 16]`), are joined to `[..., groups * 32]`."""
    if part.spans[-1].dim == WHOLE:
        values = values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])
    return four_bit_pairs(values)


def encoded_lanes(
    lanes: NDArray[np.float32], *, modelopt: bool = False, short: bool = False
) -> NDArray[np.uint8]:
    """Divided values as codes, two a byte: `[32, blocks]` to `[blocks, 16]`.

    `modelopt` rounds ties towards zero and stores zero as minus zero, as that project's exporter
    does; otherwise ties go to even, as OCP's specification has it. `short`: of bfloat16.
    """
    return paired_lanes(small_codes(lanes, E2M1, half_down=modelopt, short=short))


def paired_lanes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[2n, blocks]` of four bits to `[blocks, n]`, the even lanes in the low bits."""
    both = np.left_shift(codes[1::2], 4)
    both |= codes[0::2]
    return np.ascontiguousarray(both.T)
