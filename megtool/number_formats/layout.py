"""The parts that a tensor is encoded to, with the shapes each project gives them."""

from __future__ import annotations

import math
from typing import Literal

from megtool.errors import FormatError, UsageError
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart, PartSpan

Style = Literal["modelopt", "compressed-tensors"]
"""Whose shapes and rounding: NVIDIA ModelOpt's unified export, or compressed-tensors."""

MX_BLOCK = 32

_CODES = {
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "int8": "int8",
    "int4": "int32",
    "int8words": "int32",
    "int4rows": "uint8",
    "mxfp4": "uint8",
    "nvfp4": "uint8",
}
_COLUMNS_A_CODE = {"int4": 8, "int8words": 4, "mxfp4": 2, "nvfp4": 2}


def layout(
    packing: str,
    shape: Index,
    style: Style = "modelopt",
    *,
    codes: str | None = None,
    scale: str = "float32",
) -> tuple[PackedPart, ...]:
    """The parts of a tensor of `shape` (`[..., out, in]`) in `packing`.

    A packing is a number format and what has a scale: `tensor`, `channel` (each row), a number of
    columns, or `rows x columns`, as in `fp8:tensor`, `int8:channel`, `int4rows:128` (two rows a
    byte), `int4:128` (32-bit words), `fp8:128x128`, `mxfp8:32`, `mxfp4:32`, `nvfp4:16`. `codes` may
    be `float8_e5m2` for FP8; `scale` is the type of scales that no format fixes. Blocks of rows and
    columns need not divide the tensor: the last ones are cut, as in DeepSeek's checkpoints.

    Raises:
        FormatError: no such packing.
        UsageError: groups do not divide the columns (with the largest that do), or there is an odd
            number of rows for row pairs or of columns for pairs of these.
    """
    name = packing.partition(":")[0]
    if name not in _CODES:
        raise FormatError(f"unknown packing {packing!r}", hint=f"known: {', '.join(_CODES)}")
    if len(shape) < 2:
        raise UsageError(f"a tensor of shape {list(shape)} has no rows to be stored as {packing}")
    last = len(shape) - 1
    stored_shape, spans = list(shape), [PartSpan(d) for d in range(len(shape))]
    if name == "int4rows":
        if shape[-2] % 2:
            raise UsageError(
                f"{shape[-2]} rows cannot be stored two a byte",
                hint="exclude this tensor, or use int4 (words along the columns)",
            )
        stored_shape[-2], spans[-2] = shape[-2] // 2, PartSpan(last - 1, 2)
    if per := _COLUMNS_A_CODE.get(name):
        if per == 2 and shape[-1] % 2:
            raise UsageError(f"{shape[-1]} columns cannot be stored two a byte")
        stored_shape[-1], spans[-1] = -(-shape[-1] // per), PartSpan(last, per)
    parts = [
        PackedPart(
            role=CODES, dtype=codes or _CODES[name], shape=tuple(stored_shape), spans=tuple(spans)
        )
    ]
    kind = {"mxfp8": "float8_e8m0fnu", "mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn"}
    parts.append(_scale(packing, shape, style, kind.get(name, scale)))
    if name == "nvfp4":
        role = SCALE_2 if style == "modelopt" else DIVISOR
        parts.append(_per_tensor(role, "float32", style))
    return tuple(parts)


def _scale(packing: str, shape: Index, style: Style, dtype: str) -> PackedPart:
    name, _, granularity = packing.partition(":")
    rows = tuple(PartSpan(d) for d in range(len(shape) - 1))
    last = len(shape) - 1
    if granularity == "tensor":
        return _per_tensor(SCALE, dtype, style)
    if granularity == "channel":
        if style == "modelopt":
            return PackedPart(role=SCALE, dtype=dtype, shape=shape[:-1], spans=rows)
        spans = (*rows, PartSpan(WHOLE))
        return PackedPart(role=SCALE, dtype=dtype, shape=(*shape[:-1], 1), spans=spans)
    sizes = granularity.split("x")
    if not 1 <= len(sizes) <= 2 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise FormatError(f"packing {packing!r} does not name the granularity of its scales")
    if name.startswith("mx") and granularity != str(MX_BLOCK):
        raise FormatError(f"packing {packing!r}: MX formats have a scale for every {MX_BLOCK}")
    per = int(sizes[-1])
    if len(sizes) == 1:
        check_divides(shape[-1], per, "columns", even=name == "nvfp4")
        spans = (*rows, PartSpan(last, per))
        return PackedPart(
            role=SCALE, dtype=dtype, shape=(*shape[:-1], shape[-1] // per), spans=spans
        )
    high = int(sizes[0])
    counts = -(-shape[-2] // high), -(-shape[-1] // per)
    two = PartSpan(last - 1, high), PartSpan(last, per)
    if style == "modelopt" and len(shape) == 2:
        two_level = (two[0], PartSpan(WHOLE), two[1], PartSpan(WHOLE))
        return PackedPart(
            role=SCALE, dtype=dtype, shape=(counts[0], 1, counts[1], 1), spans=two_level
        )
    return PackedPart(
        role=SCALE, dtype=dtype, shape=(*shape[:-2], *counts), spans=(*rows[:-1], *two)
    )


def _per_tensor(role: str, dtype: str, style: Style) -> PackedPart:
    if style == "modelopt":
        return PackedPart(role=role, dtype=dtype, shape=(), spans=())
    return PackedPart(role=role, dtype=dtype, shape=(1,), spans=(PartSpan(WHOLE),))


def check_divides(size: int, per: int, label: str, *, even: bool = False) -> None:
    """Whether blocks of `per` fill `size` columns or rows.

    Raises:
        UsageError: they do not; the hint names the largest size up to `per` that does.
    """
    if size % per == 0 and not (even and per % 2):
        return
    step = 2 if even and size % 2 == 0 else 1
    best = largest_divisor(size // step, max(1, per // step)) * step
    raise UsageError(
        f"blocks of {per} do not divide {size} {label}",
        hint=f"the largest size up to {per} that does is {best}",
    )


def largest_divisor(size: int, limit: int) -> int:
    """The largest number up to `limit` that divides `size`."""
    low = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return max(d for n in low for d in (n, size // n) if d <= limit)
