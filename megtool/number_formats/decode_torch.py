"""Decodes packed tensors with torch, on any device: the same numbers as `number_formats.decode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megtool.errors import FormatError
from megtool.number_formats.decode import (
    CODES,
    COLUMNS,
    DIVISOR,
    LOW_RANK,
    LOW_RANK_UP,
    SCALE,
    SCALE_2,
    ZEROS,
)
from megtool.number_formats.low_rank import BITS, RANKS
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart

PACKINGS = ("fp8", "mxfp8", "int8", "int4", "int8words", "int4rows", "mxfp4", "nvfp4")
"""The first words of the packings that are decoded."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_torch(
    packing: str,
    parts: Sequence[PackedPart],
    windows: Mapping[str, Tensor],
    lo: Index,
    hi: Index,
) -> Tensor:
    """The elements `lo:hi` of a tensor, float32 of that shape (any strides), bit for bit those of
    `decode`.

    `windows` holds, by role, what `PackedPart.window(lo, hi)` delimits of each part, as bytes in a
    last dimension (`as_bytes`). Zero points have an element each, as `unpacked_zeros` gives them.

    Raises:
        FormatError: no such packing.
    """
    name = packing.partition(":")[0]
    if name not in PACKINGS:
        raise FormatError(
            f"the packing {packing!r} is not decoded here", hint=f"known: {', '.join(PACKINGS)}"
        )
    by_role = {p.role: p for p in parts}
    codes = by_role[CODES]
    order = codes.order
    index = tuple(
        slice(lo[s.dim] % s.per, lo[s.dim] % s.per + hi[s.dim] - lo[s.dim])
        for s in codes.spans
        if s.dim != WHOLE
    )
    out = _codes(name, windows[CODES], codes)[index].contiguous()
    if ZEROS in by_role:
        _apply(out, *_factors(windows[ZEROS], by_role[ZEROS], lo, hi, order), shift=True)
    if SCALE in by_role:
        by, per = _factors(windows[SCALE], by_role[SCALE], lo, hi, order)
        for role in (SCALE_2, DIVISOR):
            if role in by_role:
                more, _ = _factors(windows[role], by_role[role], lo, hi, order)
                by = by / more if role == DIVISOR else by * more
        _apply(out, by, per)
    if LOW_RANK_UP in by_role:
        up, down = (_values(windows[r], by_role[r].dtype) for r in LOW_RANK)
        out += low_rank_product(up, down)
    if COLUMNS in by_role:
        _apply(out, *_factors(windows[COLUMNS], by_role[COLUMNS], lo, hi, order))
    return out.permute([order.index(d) for d in range(len(order))])


def _codes(name: str, raw: Tensor, part: PackedPart) -> Tensor:
    """What the codes of a window mean before scaling, float32, an axis for each dimension."""
    if name in ("fp8", "mxfp8"):
        return raw.squeeze(-1).view(getattr(torch, part.dtype)).float()
    if name == "int8":
        return raw.squeeze(-1).view(torch.int8).float()
    if name == "int4rows":
        signed = raw.squeeze(-1)
        pairs = torch.stack([signed & 15, signed >> 4], -2)  # [..., r, 2, c]
        pairs = (pairs ^ 8).float() - 8
        return pairs.flatten(-3, -2)
    flat = raw.flatten(-2)  # bytes along the columns
    if name == "int8words" or (name == "int4" and part.spans[-1].per == 4):
        return flat.float() - 128
    if part.spans[-1].dim == WHOLE:
        flat = flat.flatten(-2)
    nibbles = torch.stack([flat & 15, flat >> 4], -1).flatten(-2)
    if name == "int4":
        return nibbles.float() - 8
    table = torch.tensor((*_E2M1, *(-x for x in _E2M1)), device=raw.device)
    return table[nibbles.int()]


def _values(raw: Tensor, kind: str) -> Tensor:
    """The numbers of a window of scales, float32."""
    if kind == "float8_e8m0fnu":
        bits = raw.squeeze(-1).int()
        powers = torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)
        return torch.where(bits == 255, torch.nan, powers)
    return raw.view(getattr(torch, kind)).squeeze(-1).float()


def _factors(
    raw: Tensor, part: PackedPart, lo: Index, hi: Index, order: Index
) -> tuple[Tensor, int]:
    """A window of scales as float32, its axes in `order`, those the scale lacks of length 1; and
    what one index of the last axis serves where it is not spread (else 0)."""
    values = _values(raw, part.dtype)
    spans = [(i, s) for i, s in enumerate(part.spans) if s.dim != WHOLE]
    values = values.reshape([values.shape[i] for i, _ in spans])
    dims = [s.dim for _, s in spans]
    named = {s.dim: s for _, s in spans}
    values = values.permute([dims.index(d) for d in order if d in named])
    sizes = iter(values.shape)
    values = values.reshape([next(sizes) if d in named else 1 for d in order])
    for axis, d in enumerate(order):
        if d not in named or named[d].per == 1:
            continue
        per, n, begin = named[d].per, hi[d] - lo[d], lo[d] % named[d].per
        if axis == len(order) - 1 and not begin and n % per == 0:
            return values, per
        values = values.repeat_interleave(per, axis).narrow(axis, begin, n)
    return values, 0


def _apply(out: Tensor, by: Tensor, per: int, *, shift: bool = False) -> None:
    """Multiply `out` by the result of `_factors`, or subtract it, in place."""
    if per:
        out, by = out.view(*out.shape[:-1], -1, per), by.unsqueeze(-1)
    if shift:
        out.sub_(by)
    else:
        out.mul_(by)


def low_rank_product(up_OR: Tensor, down_RI: Tensor) -> Tensor:
    """`up @ down`, float32 `[out, in]`, with the bits of `megtool.number_formats.low_rank`."""
    up, up_power = _integers(up_OR)
    down, down_power = _integers(down_RI.T)
    power = torch.exp2((up_power[:, None] + down_power).double())
    out = torch.zeros(len(up), len(down), dtype=torch.float64, device=up.device)
    for up_part, down_part in zip(
        torch.split(up, RANKS, 1), torch.split(down, RANKS, 1), strict=True
    ):
        out += (up_part @ down_part.T) * power
    return out.float()


def _integers(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers in float64, and the exponent of the power of two of each row."""
    power = torch.frexp(rows.abs().amax(1))[1] - BITS
    return (rows.double() * torch.exp2(-power.double())[:, None]).round(), power


def as_bytes(window: Tensor) -> Tensor:
    """A contiguous window as uint8, with the bytes of each element in a last dimension."""
    return window.contiguous().unsqueeze(-1).view(torch.uint8)
