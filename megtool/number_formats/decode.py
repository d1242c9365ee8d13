"""Decodes a box of a packed tensor from windows of its parts, in any number format.

The formula is the same for all: `(code - zero) * scale`, computed in float32, where `scale` may
itself be a product; what differs is how codes lie in bytes, and that is each format's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.number_formats import bitsandbytes, fp8, gguf, int4, int8, mxfp4, nvfp4, word_codes
from megtool.number_formats.low_rank import low_rank_product
from megtool.number_formats.packed_parts import Index, PackedPart, factors, scale, trimmed
from megtool.number_formats.small_floats import single

CODES = "codes"
ZEROS = "zeros"
SCALE = "scale"
SCALE_2 = "scale_2"
DIVISOR = "divisor"
COLUMNS = "columns"
LOW_RANK_UP = "low_rank_up"
LOW_RANK_DOWN = "low_rank_down"
LOW_RANK = (LOW_RANK_UP, LOW_RANK_DOWN)
GROUPS = "groups"
BIAS = "bias"
TABLE = "table"
SCALE_TABLE = "scale_table"
NESTED_SCALE = "nested_scale"
STATE = "state"
ROLES = (
    *(CODES, ZEROS, SCALE, SCALE_2, DIVISOR, *LOW_RANK, COLUMNS),
    *(GROUPS, BIAS, TABLE, SCALE_TABLE, NESTED_SCALE, STATE),
)
"""The parts a tensor may have. `scale` is multiplied by `scale_2`, or divided by `divisor`, before
it multiplies the codes; the product of `low_rank_up` `[out, rank]` and `low_rank_down` `[rank, in]`
is added (SVDQuant); `columns` multiplies what comes of it. `groups` says of each column which scale
and zero point are its own (GPTQ's `g_idx`); `bias` is added after scaling (MLX). Codes of `table`
name a value there, and so does `scale` in `scale_table`, which is multiplied by `nested_scale`;
`state` is JSON with the sizes of blocks (bitsandbytes)."""

_MULTIPLIERS = (
    *(ZEROS, SCALE, SCALE_2, DIVISOR, COLUMNS),
    *(BIAS, TABLE, SCALE_TABLE, NESTED_SCALE),
)
_WRONG = "nan-scales"
_HINT = "it is damaged, or was quantized so: megtool lint says which scales are wrong"

Codes = Callable[[NDArray[Any], PackedPart], NDArray[np.float32]]

FORMATS: Mapping[str, Codes] = {
    "fp8": fp8.codes,
    "mxfp8": fp8.codes,
    "int8": int8.codes,
    "int4": int4.codes,
    "int8words": int4.codes,
    "int4rows": int4.codes_of_row_pairs,
    "mxfp4": mxfp4.codes,
    "nvfp4": nvfp4.codes,
    "nvfp4blocks": gguf.codes_of_nvfp4,
    **{f"gptq{bits}": word_codes.gptq_codes for bits in (2, 3, 4, 8)},
    **{f"gptq_v2_{bits}": word_codes.gptq_codes for bits in (2, 3, 4, 8)},
    "awq4": word_codes.awq_codes,
    **{f"mlx{bits}": word_codes.mlx_codes for bits in (2, 3, 4, 5, 6, 8)},
    "nf4": bitsandbytes.codes_of_four_bits,
    "fp4": bitsandbytes.codes_of_four_bits,
    "int8rows": int8.codes,
}
"""Number formats by the first word of a packing (`fp8:128x128`)."""


def decode(
    packing: str,
    parts: Sequence[PackedPart],
    windows: Mapping[str, NDArray[Any]],
    lo: Index,
    hi: Index,
    *,
    is_strict: bool = True,
) -> NDArray[np.float32]:
    """The elements `lo:hi` of a tensor, float32 of that shape (any strides).

    `windows` holds, by role, what `PackedPart.window(lo, hi)` delimits of each part, in
    `DType.view`.

    Raises:
        FormatError: no such number format; with `is_strict`, a scale or zero point is NaN or
            infinite, or elements become so by it (codes may be NaN and infinity themselves).
    """
    name = packing.partition(":")[0]
    if name not in FORMATS:
        raise FormatError(
            f"the packing {packing!r} is unknown", hint=f"known: {', '.join(FORMATS)}"
        )
    by_role = {p.role: p for p in parts}
    if not is_strict:
        with np.errstate(all="ignore"):
            return _decode(name, by_role, windows, lo, hi)
    check_finite(parts, windows)
    try:
        with np.errstate(over="raise", divide="raise"):
            return _decode(name, by_role, windows, lo, hi)
    except FloatingPointError as e:
        raise FormatError(
            "its scales are so large or small that elements are infinite",
            hint=_HINT,
            error_id=_WRONG,
        ) from e


def check_finite(parts: Sequence[PackedPart], windows: Mapping[str, NDArray[Any]]) -> None:
    """Refuse scales and zero points that are no numbers.

    Raises:
        FormatError: one of them is NaN or infinite.
    """
    for part in parts:
        if part.role not in _MULTIPLIERS or part.dtype.startswith(("int", "uint")):
            continue
        values = single(windows[part.role], part.dtype)
        wrong = int(values.size - np.isfinite(values).sum())
        if wrong:
            count = f"{wrong:,} of {values.size:,} numbers" if values.size > 1 else "the number"
            raise FormatError(
                f"{count} of its {part.role.replace('_', ' ')} {'are' if wrong > 1 else 'is'} NaN "
                "or infinite",
                hint=_HINT,
                error_id=_WRONG,
            )


def _decode(
    name: str,
    by_role: Mapping[str, PackedPart],
    windows: Mapping[str, NDArray[Any]],
    lo: Index,
    hi: Index,
) -> NDArray[np.float32]:
    order = by_role[CODES].order
    out = trimmed(FORMATS[name](windows[CODES], by_role[CODES]), by_role[CODES], lo, hi)
    out = np.ascontiguousarray(out)
    if TABLE in by_role:
        out = bitsandbytes.looked_up_values(out, windows[TABLE])
    if GROUPS in by_role:
        _scale_by_groups(out, name, by_role, windows, lo, hi)
        return out.transpose(np.argsort(order))
    if zeros := by_role.get(ZEROS):
        values, per = _zeros(name, windows[ZEROS], zeros, lo, hi, order)
        scale(out, values, per, shift=True)
    if NESTED_SCALE in by_role:
        by, per = _nested_factors(by_role, windows, lo, hi, order)
        scale(out, by, per)
    elif SCALE in by_role:
        by, per = factors(windows[SCALE], by_role[SCALE], lo, hi, order)
        for role, divides in ((SCALE_2, False), (DIVISOR, True)):
            if role in by_role:
                more, spread = factors(windows[role], by_role[role], lo, hi, order)
                if spread:
                    raise FormatError(f"{role} has a value for every {spread} columns")
                by = by / more if divides else by * more
        scale(out, by, per)
    if name == "int8rows":
        out *= bitsandbytes.INT8_STEP
    if BIAS in by_role:
        by, per = factors(windows[BIAS], by_role[BIAS], lo, hi, order)
        kind = by_role[BIAS].dtype
        word_codes.round_to(out, kind)  # as MLX does, which computes in the dtype of the scales
        scale(out, -by, per, shift=True)
        word_codes.round_to(out, kind)
    if LOW_RANK_UP in by_role:
        up, down = (single(windows[r], by_role[r].dtype) for r in LOW_RANK)
        out += low_rank_product(up, down)
    if COLUMNS in by_role:
        by, per = factors(windows[COLUMNS], by_role[COLUMNS], lo, hi, order)
        scale(out, by, per)
    return out.transpose(np.argsort(order))


def _scale_by_groups(
    out: NDArray[np.float32],
    name: str,
    by_role: Mapping[str, PackedPart],
    windows: Mapping[str, NDArray[Any]],
    lo: Index,
    hi: Index,
) -> None:
    """Apply to each column (the first axis of `out`) the zero point and scale of its group."""
    index = windows[GROUPS].astype(np.int64)
    scales = single(windows[SCALE], by_role[SCALE].dtype)
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < len(scales):
        raise FormatError(
            f"its g_idx names group {int(index.max())} of {len(scales)}",
            hint="the file is damaged: fetch it again",
        )
    zeros, _ = word_codes.unpacked_word_zeros(windows[ZEROS], by_role[ZEROS], lo, hi, name)
    out -= zeros[index]
    out *= scales[index]


def _nested_factors(
    by_role: Mapping[str, PackedPart],
    windows: Mapping[str, NDArray[Any]],
    lo: Index,
    hi: Index,
    order: Index,
) -> tuple[NDArray[np.float32], int]:
    """Scales that are codes themselves, lined up with the box."""
    part = by_role[SCALE]
    values = bitsandbytes.nested_scales(
        windows[SCALE],
        single(windows[SCALE_TABLE], by_role[SCALE_TABLE].dtype),
        single(windows[NESTED_SCALE], by_role[NESTED_SCALE].dtype),
        windows[STATE].tobytes(),
        part,
        part.window(lo, hi),
    )
    return factors(values, replace(part, dtype="float32"), lo, hi, order)


def _zeros(
    name: str, values: NDArray[Any], part: PackedPart, lo: Index, hi: Index, order: Index
) -> tuple[NDArray[np.float32], int]:
    """Zero points lined up with the box; those in 32-bit words are packed along the rows."""
    if name.startswith(("gptq", "awq")):
        unpacked, plain = word_codes.unpacked_word_zeros(values, part, lo, hi, name)
        return factors(unpacked, plain, lo, hi, order)
    if part.dtype != "int32":
        return factors(values, part, lo, hi, order)
    rows, plain = int4.unpacked_zeros(values, part, lo, hi)
    return factors(rows, plain, lo, hi, order)
