"""Encode: a box of elements to windows of a packed tensor's parts, whatever its number format.

The opposite of `megtool.packing.decode`, by the same parts: `codes = round(value / scale)`, the
quotient in float32. Scales are given, or computed from the box where it holds all that is under
them. Boxes of a few hundred KiB stay in the processor's cache from the first pass to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError, UsageError
from megtool.packing import fp8, int4, int8, mxfp4, nvfp4
from megtool.packing.amax import amax
from megtool.packing.decode import CODES, DIVISOR, SCALE, SCALE_2
from megtool.packing.floats import single
from megtool.packing.layout import Style
from megtool.packing.parts import WHOLE, Index, Part
from megtool.packing.rounding import E2M1, E4M3, SMALL, rounded, small_codes
from megtool.packing.scales import RULES

Encoder = Callable[[NDArray[np.float32], Part], NDArray[Any]]

FORMATS: Mapping[str, Encoder] = {
    "fp8": fp8.encoded,
    "int8": int8.encoded,
    "int4": int4.encoded,
    "int8words": int4.encoded,
    "int4rows": int4.encoded_row_pairs,
}
"""Number formats whose codes are found one by one, by the first word of a packing."""

LANES = ("mxfp8", "mxfp4", "nvfp4")
"""Those of short blocks: handled with the first columns of all blocks side by side, then the second
ones, and so on, as each pass then runs over long rows that need one scale each."""

_LARGEST = {"int8": 127.0, "int8words": 127.0, "int4": 7.0, "int4rows": 7.0}


def encode(
    packing: str,
    parts: Sequence[Part],
    values: NDArray[Any],
    dtype: str,
    lo: Index,
    hi: Index,
    *,
    scales: Mapping[str, NDArray[Any]] | None = None,
    style: Style = "modelopt",
) -> dict[str, NDArray[Any]]:
    """The windows of all `parts` (of `megtool.packing.layout.layout`) for the elements `lo:hi`.

    `values` are these elements, of type `dtype` (float32, bfloat16 or float16), as `DType.view`
    holds them; they are not changed. `scales` are windows by role of those scales that are known;
    any other is computed by the rules of `style`, from the box alone. `style` also decides, as in
    its project, the type the quotient is rounded to before it is encoded, and MXFP4's ties.

    Raises:
        FormatError: no such packing, or the elements hold NaN or infinity.
        UsageError: the box cuts blocks, pairs or words, or a scale to be computed is of more than
            the box.
    """
    name = packing.partition(":")[0]
    if name not in FORMATS and name not in LANES:
        known = ", ".join([*FORMATS, *LANES])
        raise FormatError(f"unknown packing {packing!r}", hint=f"known: {known}")
    by_role = {p.role: p for p in parts}
    shape = _shape(by_role[CODES], by_role[SCALE], hi)
    for part in parts:
        _check_borders(part, lo, hi, shape)
    out = _scales(name, by_role, values, dtype, lo, hi, scales or {}, style)
    codes = by_role[CODES]
    first, end = codes.window(lo, hi)
    window = tuple(b - a for a, b in zip(first, end, strict=True))
    if not math.prod(window):
        return {CODES: np.empty(window, dtype_of(codes.dtype).view), **out}
    divide = [_factor(by_role, out, lo, hi)]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if name in LANES:
            stored = _encoded_lanes(name, values, dtype, divide[0], codes, style)
        else:
            scaled = _divided(values, dtype, divide[0], by_role[SCALE], lo, hi)
            scaled = rounded(scaled, quotient_dtype(name, dtype, by_role, style))
            stored = FORMATS[name](scaled, codes)
    return {CODES: stored.reshape(window), **out}
