"""Encode: a box of elements to windows of a packed tensor's parts, whatever its number format.

The opposite of `megtool.packing.decode`, by the same parts: `codes = round(value / scale)`, the
quotient in float32. Scales are given, or computed from the box where it holds all that is under
them. Boxes of a few hundred KiB stay in the processor's cache from the first pass to the last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError, UsageError
from megtool.packing import fp8, int4, int8, mxfp4, nvfp4
from megtool.packing.amax import amax, magnitudes, values_of
from megtool.packing.decode import CODES, DIVISOR, SCALE, SCALE_2
from megtool.packing.floats import single
from megtool.packing.layout import Style
from megtool.packing.parts import WHOLE, Index, Part, Span
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

_SHORT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Types of which all values fit a table, with the bits of infinity."""

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
    codes, scale = by_role[CODES], by_role[SCALE]
    for part in parts:
        _check_borders(part, lo, hi)
    if name in LANES:
        per = scale.spans[-1].per
        values = np.ascontiguousarray(values.reshape(-1, per).T)
    out = _scales(name, by_role, values, dtype, lo, hi, scales or {}, style)
    first, end = codes.window(lo, hi)
    window = tuple(b - a for a, b in zip(first, end, strict=True))
    if not math.prod(window):
        return {CODES: np.empty(window, dtype_of(codes.dtype).view), **out}
    by = _factor(by_role, out)
    # A quotient may overflow to infinity, which is saturated; zero is never divided by.
    with np.errstate(over="ignore", invalid="ignore"):
        if name in LANES:
            stored = _encoded_lanes(name, values, dtype, by, codes, style)
        else:
            quotient = quotient_dtype(name, dtype, scale, style)
            if by.size == 1 and dtype in _SHORT and name in ("fp8", "int8"):
                table = _table(name, codes.dtype, dtype, by.item(), quotient)
                stored = _looked_up(name, table, values, dtype)
            else:
                scaled = _divided(values, dtype, by, scale, lo, hi)
                stored = FORMATS[name](rounded(scaled, quotient), codes)
    return {CODES: stored.reshape(window), **out}


def quotient_dtype(name: str, dtype: str, scale: Part, style: Style) -> str:
    """What a quotient is rounded to before it is encoded.

    torch divides elements by a scale of the same type in that type, and by a tensor without
    dimensions in the type of the elements: so modelopt's FP8 per tensor, of bfloat16, is rounded
    twice, and so is all that compressed-tensors makes with scales in the weight's own type.
    """
    if style == "modelopt":
        return dtype if name == "fp8" and scale.shape == () else "float32"
    return dtype if scale.dtype == dtype else "float32"


def _scales(
    name: str,
    parts: Mapping[str, Part],
    values: NDArray[Any],
    dtype: str,
    lo: Index,
    hi: Index,
    given: Mapping[str, NDArray[Any]],
    style: Style,
) -> dict[str, NDArray[Any]]:
    """The windows of all scales: those given, the others from the box."""
    out = {role: given[role] for role in parts if role in given}
    rules = RULES[style]
    for role in (SCALE_2, DIVISOR):
        if role in parts and role not in out:
            out[role] = rules.second(_found(name, parts, role, values, dtype, lo, hi))
    if SCALE in out:
        return out
    scale = parts[SCALE]
    found = _found(name, parts, SCALE, values, dtype, lo, hi)
    if name == "nvfp4":
        second = out[SCALE_2 if SCALE_2 in parts else DIVISOR]
        out[SCALE] = rules.block(found, np.asarray(second, np.float32).reshape(()))
    elif scale.dtype == "float8_e8m0fnu":
        out[SCALE] = rules.exponent(found, E4M3 if name == "mxfp8" else E2M1)
    else:
        largest = _LARGEST.get(name) or SMALL[parts[CODES].dtype].largest
        out[SCALE] = _stored(rules.scale(found, largest, scale.dtype), scale.dtype)
    return out


def _found(
    name: str,
    parts: Mapping[str, Part],
    role: str,
    values: NDArray[Any],
    dtype: str,
    lo: Index,
    hi: Index,
) -> NDArray[np.float32]:
    part, codes = parts[role], parts[CODES]
    served = {s.dim for s in part.spans}
    first, end = codes.window(lo, hi)
    for axis, span in enumerate(codes.spans):
        if span.dim not in served and (first[axis], end[axis]) != (0, codes.shape[axis]):
            raise UsageError(
                f"the {role} of a box {list(lo)} to {list(hi)} is not computed, as it is of more",
                hint="gather amax over all boxes first, and give the scale",
            )
    if name in LANES and role == SCALE:
        first, end = part.window(lo, hi)
        top = values_of(np.maximum.reduce(magnitudes(values, dtype), axis=0), dtype)
        found = top.reshape([b - a for a, b in zip(first, end, strict=True)])
    else:
        found = amax(values, dtype, part, lo, hi)
    if not np.isfinite(found).all():
        raise FormatError("elements are NaN or infinite", hint="they cannot be quantised")
    return found


def _stored(scale: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Scales as they lie in files."""
    if dtype == "bfloat16":
        return (scale.view(np.uint32) >> 16).astype("<u2")
    return scale.astype(dtype_of(dtype).view)


def _check_borders(part: Part, lo: Index, hi: Index) -> None:
    for n, s in zip(part.shape, part.spans, strict=True):
        if s.dim == WHOLE or s.per == 1:
            continue
        if lo[s.dim] % s.per or (hi[s.dim] % s.per and -(-hi[s.dim] // s.per) != n):
            raise UsageError(
                f"a box {list(lo)} to {list(hi)} cuts {part.role} of {s.per} in dimension {s.dim}",
                hint=f"begin and end it at multiples of {s.per}",
            )


def _factor(parts: Mapping[str, Part], scales: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """What elements are divided by, in the shape of the scale's window."""
    out = single(np.asarray(scales[SCALE]), parts[SCALE].dtype)
    for role, divides in ((SCALE_2, False), (DIVISOR, True)):
        if role in parts:
            more = single(np.asarray(scales[role]), parts[role].dtype).reshape(())
            out = out / more if divides else out * more
    return out


def _fresh(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Elements as float32, in memory of their own."""
    if dtype == "bfloat16":
        out = np.empty(values.shape, np.uint32)
        np.left_shift(values, np.uint32(16), out=out, dtype=np.uint32, casting="unsafe")
        return out.view(np.float32)
    return np.array(values, np.float32, order="C")


def _divided(
    values: NDArray[Any],
    dtype: str,
    by: NDArray[np.float32],
    scale: Part,
    lo: Index,
    hi: Index,
) -> NDArray[np.float32]:
    """The elements over their scales, one quotient an element."""
    named = {s.dim: s.per for s in scale.spans if s.dim != WHOLE}
    out = _fresh(values, dtype)
    whole: list[int] = []
    served: list[int] = []
    for d, n in enumerate(out.shape):
        per = named.get(d, 0)
        if per > 1:
            whole += [n // per, per]
            served += [n // per, 1]
        else:
            whole.append(n)
            served.append(n if per else 1)
    view = out.reshape(whole)
    np.divide(view, by.reshape(served), out=view)
    return out


def _encoded_lanes(
    name: str,
    values: NDArray[Any],
    dtype: str,
    by: NDArray[np.float32],
    codes: Part,
    style: Style,
) -> NDArray[Any]:
    blocks = by.reshape(-1)
    lanes = _fresh(values, dtype)
    np.divide(lanes, blocks, out=lanes)
    short = dtype == "bfloat16"  # over powers of two
    if name == "mxfp8":
        return np.ascontiguousarray(small_codes(lanes, SMALL[codes.dtype], short=short).T)
    if name == "nvfp4":
        return nvfp4.encoded_lanes(lanes)
    return mxfp4.encoded_lanes(lanes, modelopt=style == "modelopt", short=short)


@functools.lru_cache(maxsize=16)
def _table(name: str, codes: str, dtype: str, by: float, quotient: str) -> NDArray[np.uint8]:
    """The codes of all elements of 16 bits, by their bits, where one scale serves them all."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = single(bits.view(np.float16) if dtype == "float16" else bits, dtype)
    if name == "int8":
        x = np.nan_to_num(x)  # NaN is looked for in the elements themselves
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = rounded(x / np.float32(by), quotient)
    part = Part(role=CODES, dtype=codes, shape=bits.shape, spans=(Span(0),))
    return FORMATS[name](scaled, part).view(np.uint8)


def _looked_up(
    name: str, table: NDArray[np.uint8], values: NDArray[Any], dtype: str
) -> NDArray[Any]:
    if name == "int8" and magnitudes(values, dtype).max() > _SHORT[dtype]:
        raise FormatError("elements are NaN", hint="they cannot be quantised")
    bits = np.ascontiguousarray(values).view(np.uint16).reshape(-1)
    found = np.empty(values.shape, np.uint8)
    into, size = found.reshape(-1), 1 << 15
    index = np.empty(size, np.intp)
    for begin in range(0, bits.size, size):
        part = bits[begin : begin + size]
        np.copyto(index[: part.size], part)
        np.take(table, index[: part.size], out=into[begin : begin + size], mode="clip")
    return found.view(np.int8) if name == "int8" else found
