"""MXFP4: FP4 codes, two a byte, and a power of two (E8M0) for every 32 of them (OCP MX)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.int4 import paired
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.number_formats.rounding import small_codes
from megtool.number_formats.small_floats import E2M1, four_bit_pairs, single
from megtool.number_formats.thread_buffers import look_up, scratch


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


_FAR = 100  # binary places up to which zeros moved up remain too small for any code but zero's
_INFINITY = 0x7F80
_MINUS_ZERO = -0x8000  # its bits as a signed number


def encoded_bf16(
    values: NDArray[np.uint16],
    exponents: NDArray[np.uint8],
    out: NDArray[Any],
    *,
    half_down: bool,
    sure: bool,
) -> bool:
    """Put the codes of bfloat16 bits `[rows, columns]` over E8M0 scales `[rows, blocks]` to `out`,
    two a byte. `sure` says that the scales are of these very numbers, which are all finite.

    False, and nothing done, where a float is needed: for scales above 1, infinity and NaN, numbers
    that are tiny, and those that the scales bring near infinity.
    """
    moved = _moved(values, exponents, sure)
    if moved is None:
        return False
    room = scratch("codes", values.shape, np.uint8)
    look_up(_table(half_down), moved, room)
    _sign_zeros(values, room, half_down=half_down)
    paired(room, out)
    return True


def _sign_zeros(values: NDArray[np.uint16], codes: NDArray[np.uint8], *, half_down: bool) -> None:
    """Give FP4 zeros the sign that `small_codes` gives them, whatever their own: moved up they are
    tiny numbers, and keep it."""
    if half_down and not values.min():
        codes[values == 0] = 8
    if not half_down and values.view(np.int16).min() == _MINUS_ZERO:
        codes[values == 0x8000] = 0


def _moved(
    values: NDArray[np.uint16], exponents: NDArray[np.uint8], sure: bool
) -> NDArray[np.uint16] | None:
    rows, count = exponents.shape
    up = 127 - exponents.astype(np.int16)
    if up.min() < 0:
        return None
    far = up > _FAR
    if far.any():
        blocks = values.reshape(rows, count, values.shape[1] // count)
        if (blocks[far] & np.uint16(0x7FFF)).any():
            return None
        up[far] = 0
    steps = up.astype(np.uint64) << np.uint64(7)
    if not sure:
        top = max(int(values.view(np.int16).max()), int(values.max()) & 0x7FFF)
        if top + int(steps.max()) >= _INFINITY:
            return None
    # Sums stay within 16 bits, so four are made at a time.
    out = scratch("moved", values.shape, np.uint16)
    four = values.view(np.uint64).reshape(rows, count, -1)
    steps *= np.uint64(0x0001_0001_0001_0001)
    np.add(four, steps[:, :, None], out=out.view(np.uint64).reshape(four.shape))
    return out


@functools.cache
def _table(half_down: bool) -> NDArray[np.uint8]:
    """Codes by the bits of a bfloat16; those of NaN are nobody's."""
    x = single(np.arange(1 << 16, dtype=np.uint16), "bfloat16")
    return small_codes(np.nan_to_num(x), E2M1, half_down=half_down)
