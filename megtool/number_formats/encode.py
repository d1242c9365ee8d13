"""Encodes a box of elements into windows of a packed tensor's parts, in any number format.

The inverse of `megtool.number_formats.decode`, with the same parts:
`codes = round(value / scale)`, the quotient in float32. Scales are given, or computed from the
box if it covers everything under them. Boxes are cut into chunks, whose passes need little extra
memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError, UsageError
from megtool.number_formats import fp8, int4, int8, mxfp4, nvfp4
from megtool.number_formats.amax import amax
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2
from megtool.number_formats.fp8_bits import cast_to_powers
from megtool.number_formats.layout import MX_BLOCK, Style
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart, PartSpan
from megtool.number_formats.rounding import rounded
from megtool.number_formats.scales import RULES
from megtool.number_formats.small_floats import E2M1, SMALL, single
from megtool.number_formats.thread_buffers import CHUNK, look_up, scratch

Encoder = Callable[[NDArray[np.float32], PackedPart, NDArray[Any]], None]

FORMATS: Mapping[str, Encoder] = {
    "fp8": fp8.encoded,
    "mxfp8": fp8.encoded,
    "int8": int8.encoded,
    "int4": int4.encoded,
    "int8words": int4.encoded,
    "int4rows": int4.encoded_row_pairs,
    "mxfp4": mxfp4.encoded,
    "nvfp4": nvfp4.encoded,
}
"""Number formats by the first word of a packing: from quotients, which are given up, to codes."""

_SHORT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Types of which all values fit a table, with the bits of infinity."""

_LARGEST = {"int8": 127.0, "int8words": 127.0, "int4": 7.0, "int4rows": 7.0}


def encode(
    packing: str,
    parts: Sequence[PackedPart],
    values: NDArray[Any],
    dtype: str,
    lo: Index,
    hi: Index,
    *,
    scales: Mapping[str, NDArray[Any]] | None = None,
    style: Style = "modelopt",
    twice: bool = False,
    room: NDArray[Any] | None = None,
) -> dict[str, NDArray[Any]]:
    """The windows of all `parts` (see `number_formats.layout`) for the elements `lo:hi`.

    `values` are these elements, of type `dtype` (float32, bfloat16 or float16), as `DType.view`
    holds them; they are not changed. `scales` are windows by role of those scales that are known;
    any other is computed by the rules of `style`, from the box alone. `style` also decides, as in
    its project, MXFP4's ties. Quotients are rounded once; `twice` first rounds them to the type in
    which torch divides there (`quotient_dtype`), which gives that project's very bytes. `room` is
    where codes go, if it has their shape and is contiguous: an earlier box's that are done with.

    Raises:
        FormatError: no such packing, or the elements hold NaN or infinity.
        UsageError: the box cuts blocks, pairs or words, or a scale to be computed is of more than
            the box.
    """
    name = packing.partition(":")[0]
    if name not in FORMATS:
        raise FormatError(f"unknown packing {packing!r}", hint=f"known: {', '.join(FORMATS)}")
    by_role = {p.role: p for p in parts}
    codes, scale = by_role[CODES], by_role[SCALE]
    for part in parts:
        _check_borders(part, lo, hi)
    first, end = codes.window(lo, hi)
    window = tuple(b - a for a, b in zip(first, end, strict=True))
    stored = room
    if stored is None or stored.shape != window or not stored.flags.c_contiguous:
        stored = np.empty(window, dtype_of(codes.dtype).view)
    if (
        name == "mxfp8"
        and (dtype, style) == ("bfloat16", "modelopt")
        and stored.size
        and not scales
    ):
        of, into = (a.reshape(-1, window[-1]) for a in (values, stored))
        powers = cast_to_powers(of, MX_BLOCK, SMALL[codes.dtype], into)
        if powers is not None:
            return {CODES: stored, SCALE: powers.reshape(*window[:-1], -1)}
    out = _scales(name, by_role, values, dtype, lo, hi, scales or {}, style)
    if not stored.size:
        return {CODES: stored, **out}
    by = _factor(by_role, out)
    quotient = quotient_dtype(name, dtype, scale, style) if twice else "float32"
    # A quotient may overflow to infinity, which is saturated; zero is never divided by.
    with np.errstate(over="ignore", invalid="ignore"):
        if by.size == 1 and dtype in _SHORT and name in ("fp8", "int8"):
            table = _table(name, codes.dtype, dtype, by.item(), quotient)
            _look_up(name, table, values, dtype, stored)
        else:
            half_down = name == "mxfp4" and style == "modelopt"
            encoder = mxfp4.encoded_half_down if half_down else FORMATS[name]
            by_bits = dtype == "bfloat16" and name == "mxfp4"
            shape = _lined_up(scale, values.shape)
            by = (out[SCALE] if by_bits else by).reshape(shape)
            for box, under, into in _equal_blocks(values, by, scale, codes, stored):
                if by_bits:
                    sure = SCALE not in (scales or {})
                    if mxfp4.encoded_bf16(box, under, into, half_down=half_down, sure=sure):
                        continue
                    under = single(under, scale.dtype)
                encoder(rounded(divided(box, dtype, under), quotient), codes, into)
    return {CODES: stored, **out}


def quotient_dtype(name: str, dtype: str, scale: PackedPart, style: Style) -> str:
    """The dtype to which a project rounds a quotient before encoding it.

    torch divides elements by a scale of the same type in that type, and by a tensor without
    dimensions in the type of the elements: so modelopt's FP8 per tensor, of bfloat16, is rounded
    twice, and so is all that compressed-tensors makes with scales in the weight's own type. In FP8
    of a bfloat16 weight that moves 4% of the codes to the farther neighbor.
    """
    if style == "modelopt":
        return dtype if name == "fp8" and scale.shape == () else "float32"
    return dtype if scale.dtype == dtype else "float32"


def _scales(
    name: str,
    parts: Mapping[str, PackedPart],
    values: NDArray[Any],
    dtype: str,
    lo: Index,
    hi: Index,
    known_scales: Mapping[str, NDArray[Any]],
    style: Style,
) -> dict[str, NDArray[Any]]:
    """The windows of all scales: the known ones, and the others computed from the box."""
    out = {role: known_scales[role] for role in parts if role in known_scales}
    rules = RULES[style]
    for role in (SCALE_2, DIVISOR):
        if role in parts and role not in out:
            out[role] = rules.second(_amax_under(parts, role, values, dtype, lo, hi))
    if SCALE in out:
        return out
    scale = parts[SCALE]
    amaxes = _amax_under(parts, SCALE, values, dtype, lo, hi)
    if name == "nvfp4":
        second = out[SCALE_2 if SCALE_2 in parts else DIVISOR]
        out[SCALE] = rules.block(amaxes, np.asarray(second, np.float32).reshape(()))
    elif scale.dtype == "float8_e8m0fnu":
        out[SCALE] = rules.exponent(amaxes, SMALL.get(parts[CODES].dtype, E2M1))
    else:
        largest = _LARGEST.get(name) or SMALL[parts[CODES].dtype].largest
        out[SCALE] = _stored(rules.scale(amaxes, largest, scale.dtype), scale.dtype)
    return out


def _amax_under(
    parts: Mapping[str, PackedPart],
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
                f"the {role} of a box {list(lo)} to {list(hi)} cannot be computed, because it "
                "covers more than this box",
                hint="gather amax over all boxes first, and give the scale",
            )
    maxima = amax(values, dtype, part, lo, hi)
    if not np.isfinite(maxima).all():
        raise FormatError(
            "elements are NaN or infinite", hint="they cannot be quantized", error_id="nan-weights"
        )
    return maxima


def _stored(scale: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Scales as they are stored in files."""
    if dtype == "bfloat16":
        return (scale.view(np.uint32) >> 16).astype("<u2")
    return scale.astype(dtype_of(dtype).view)


def _check_borders(part: PackedPart, lo: Index, hi: Index) -> None:
    for n, s in zip(part.shape, part.spans, strict=True):
        if s.dim == WHOLE or s.per == 1:
            continue
        if lo[s.dim] % s.per or (hi[s.dim] % s.per and -(-hi[s.dim] // s.per) != n):
            raise UsageError(
                f"a box {list(lo)} to {list(hi)} cuts {part.role} of {s.per} in dimension {s.dim}",
                hint=f"begin and end it at multiples of {s.per}",
            )


def _factor(
    parts: Mapping[str, PackedPart], scales: Mapping[str, NDArray[Any]]
) -> NDArray[np.float32]:
    """The divisor of elements, in the shape of the scale's window."""
    out = single(np.asarray(scales[SCALE]), parts[SCALE].dtype)
    for role, divides in ((SCALE_2, False), (DIVISOR, True)):
        if role in parts:
            more = single(np.asarray(scales[role]), parts[role].dtype).reshape(())
            out = out / more if divides else out * more
    return out


def _lined_up(scale: PackedPart, shape: Index) -> Index:
    """The shape in which a window of `scale` has an axis for every dimension of a box."""
    named = {s.dim: s.per for s in scale.spans if s.dim != WHOLE}
    return tuple(-(-n // named[d]) if d in named else 1 for d, n in enumerate(shape))


@functools.lru_cache(maxsize=16)
def _table(name: str, codes: str, dtype: str, by: float, quotient: str) -> NDArray[np.uint8]:
    """The codes of all 16-bit elements, indexed by their bits, if one scale applies to all of
    them.
    """
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = single(bits.view(np.float16) if dtype == "float16" else bits, dtype)
    if name == "int8":
        x = np.nan_to_num(x)  # NaN is looked for in the elements themselves
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = rounded(x / np.float32(by), quotient)
    part = PackedPart(role=CODES, dtype=codes, shape=bits.shape, spans=(PartSpan(0),))
    out = np.empty(bits.shape, dtype_of(codes).view)
    FORMATS[name](scaled, part, out)
    return out.view(np.uint8)


def _look_up(
    name: str, table: NDArray[np.uint8], values: NDArray[Any], dtype: str, out: NDArray[Any]
) -> None:
    """Write the codes of all `values` to `out` (contiguous), looked up by their bits."""
    zero = np.zeros((1,) * values.ndim, np.float32)
    bits = values.view(np.uint16)
    codes = PackedPart(role=CODES, dtype="uint8", shape=values.shape, spans=_plain(values.ndim))
    for box, _, into in slabs(bits, zero, codes, out.view(np.uint8)):
        if name == "int8" and not is_number(box, _SHORT[dtype]):
            raise FormatError(
                "elements are NaN", hint="they cannot be quantized", error_id="nan-weights"
            )
        look_up(table, box, into)


def _plain(ndim: int) -> tuple[PartSpan, ...]:
    return tuple(PartSpan(d) for d in range(ndim))


def is_number(bits: NDArray[np.uint16], infinity: int) -> bool:
    """Whether no element is NaN: both signs' largest bits are at most those of infinity."""
    return int(bits.max()) <= infinity | 0x8000 and int(bits.view(np.int16).max()) <= infinity


Slab = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

_VECTOR = 32  # rows under one row of scales from which it pays to spread that over the columns


def _equal_blocks(
    values: NDArray[Any],
    by: NDArray[Any],
    scale: PackedPart,
    codes: PackedPart,
    out: NDArray[Any],
) -> Iterator[Slab]:
    """`slabs`, where the last blocks of rows and columns may be cut: they are separate boxes."""
    blocks = {s.dim: s.per for s in scale.spans if s.dim != WHOLE}
    units = {s.dim: s.per for s in codes.spans}
    down, across = values.ndim - 2, values.ndim - 1
    for r in _split(values.shape[down], blocks.get(down, 1)):
        for c in _split(values.shape[across], blocks.get(across, 1)):
            rows = _span(r.start, r.stop, blocks.get(down, 1), by.shape[down])
            columns = _span(c.start, c.stop, blocks.get(across, 1), by.shape[across])
            down_r, across_c = (
                slice(s.start // per, -(-s.stop // per))
                for s, per in ((r, units.get(down, 1)), (c, units.get(across, 1)))
            )
            into = out[..., down_r, across_c]
            yield from slabs(values[..., r, c], by[..., rows, columns], codes, into)


def _split(size: int, per: int) -> Iterator[slice]:
    """The whole blocks of `per`, and the cut one at the end."""
    whole = size // per * per
    if whole:
        yield slice(0, whole)
    if whole < size:
        yield slice(whole, size)


def slabs(
    values: NDArray[Any], by: NDArray[Any], codes: PackedPart, out: NDArray[Any]
) -> Iterator[Slab]:
    """Matrices `[rows, columns]` of `values`, in turn, with what they are divided by (`[rows or
    1 or blocks of rows, blocks of columns or 1]`) and where their codes lie in `out`.

    `by` has an axis for every dimension of `values`: 1, or the number of equal blocks in it.
    """
    served = {s.dim: s.per for s in codes.spans}
    last = values.ndim - 1
    high, wide = served.get(last - 1, 1), served.get(last, 1)
    by = np.broadcast_to(by, (*values.shape[:-2], *by.shape[-2:]))
    for lead in np.ndindex(values.shape[:-2]):
        box, under, into = values[lead], by[lead], out[lead]
        rows, columns = box.shape
        # A block of rows or columns, and a byte or word, stay whole.
        block = [n // m if m > 1 else 1 for n, m in zip(box.shape, under.shape, strict=True)]
        low = [math.lcm(block[0], high), math.lcm(block[1], wide)]
        step_r = max(CHUNK // columns // low[0], 1) * low[0]
        step_c = columns
        if step_r * columns > CHUNK:
            step_c = max(CHUNK // step_r // low[1], 1) * low[1]
        for r in range(0, rows, step_r):
            for c in range(0, columns, step_c):
                r_end, c_end = min(r + step_r, rows), min(c + step_c, columns)
                over = _span(r, r_end, block[0], under.shape[0])
                along = _span(c, c_end, block[1], under.shape[1])
                yield (
                    box[r:r_end, c:c_end],
                    under[over, along],
                    into[r // high : -(-r_end // high), c // wide : -(-c_end // wide)],
                )


def _span(begin: int, end: int, block: int, count: int) -> slice:
    return slice(begin // block, -(-end // block)) if count > 1 else slice(None)


def divided(values: NDArray[Any], dtype: str, by: NDArray[np.float32]) -> NDArray[np.float32]:
    """The elements of a slab over their scales, in this thread's own memory (contiguous), until
    the next slab's."""
    out = scratch("quotient", values.shape, np.float32)
    if dtype == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, values)
        np.left_shift(bits, np.uint32(16), out=bits)
        values = out
    elif dtype == "float16":
        np.copyto(out, values)
        values = out
    rows, columns = out.shape
    high, wide = rows // by.shape[0], columns // by.shape[1]
    if by.shape[1] > 1 and high >= _VECTOR:
        by, wide = np.repeat(by, wide, axis=1), 1
    shape = (by.shape[0], high, by.shape[1], columns // by.shape[1])
    np.divide(values.reshape(shape), by[:, None, :, None], out=out.reshape(shape))
    return out
