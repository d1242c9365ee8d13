"""Triton kernels of the casts to FP8: scale, saturate, round and compute the amax in one pass.

Those of matrices write the codes twice, as they are and transposed: a product sums along rows of
both operands, and a matrix is summed over both of its dims. Rounding is done on the bits, so that
it needs no FP8 hardware and is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
TILE = 64  # rows and columns of a matrix that a program casts both ways
AMAX_BLOCK = 8192
# Bits of the mantissa, bias of the exponent, largest value, bits of NaN.
FORMATS = {"e4m3": (3, 7, 448.0, 0x7F), "e5m2": (2, 15, 57344.0, 0x7F)}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def cast_fp8(x: Tensor, scale: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """See `fp8.cast_fp8`."""
    x = x.contiguous()
    mantissa, bias, largest, nan = FORMATS[kind]
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    programs = cdiv(x.numel(), BLOCK)
    parts = torch.zeros(max(programs, 1), dtype=torch.float32, device=x.device)
    launch(
        _cast,
        programs,
        x.device,
        x,
        scale,
        out,
        parts,
        x.numel(),
        MANTISSA=mantissa,
        BIAS=bias,
        LARGEST=largest,
        NAN=nan,
        BLOCK=BLOCK,
        num_warps=8,
    )
    # One number a program, not an atomic maximum: that would lose NaN.
    return out.view(DTYPES[kind]), parts.amax()


def _cast(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    size: tl.tensor,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of elements."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    size_x = tl.abs(x)
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, 0.0, size_x), 0)
    broken = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(parts_ptr + program, tl.where(broken, float("nan"), largest))
    code = _encode(x * tl.load(scale_ptr), MANTISSA, BIAS, LARGEST, NAN)
    tl.store(out_ptr + offsets, code, mask=offsets < size)


def _encode(
    scaled: tl.tensor,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
) -> tl.tensor:
    """The codes of fp32 values, saturated, as bytes.

    A normal number's code is its fp32 bits with the exponent's bias changed, rounded to nearest
    even by adding half of the last kept bit (less one if that bit is 0). Below the smallest normal
    number, adding the power of two whose last mantissa bit is FP8's smallest step lets the
    addition do the rounding.
    """
    is_nan = scaled != scaled
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    near = tl.minimum(tl.where(is_nan, 0.0, tl.abs(scaled)), LARGEST)
    bits = near.to(tl.int32, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    even = (bits >> drop) & 1
    normal = ((bits + (1 << (drop - 1)) - 1 + even) >> drop) - ((127 - BIAS) << MANTISSA)
    # 2^(23 + the exponent of FP8's smallest step), whose fp32 bits are an exponent alone.
    pivot: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    anchor = tl.full(scaled.shape, pivot, tl.int32).to(tl.float32, bitcast=True)
    small = (near + anchor).to(tl.int32, bitcast=True) - pivot
    smallest: tl.constexpr = (128 - BIAS) << 23  # the smallest normal number's fp32 bits
    code = tl.where(bits < smallest, small, normal)
    return (tl.where(is_nan, NAN, code) | sign).to(tl.uint8)


# ---- codes of a matrix as it is and transposed, in one pass over it


def cast_both(x_EMN: Tensor, scale: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8.cast_both`, for a stack of matrices; `scale` is [1], [E], or one for each row [M].

    The third result is the amax of each tile, [E, tiles].
    """
    x_EMN = x_EMN.contiguous()
    experts, m, n = x_EMN.shape
    rows = torch.empty(experts, m, n, dtype=torch.uint8, device=x_EMN.device)
    columns = torch.empty(experts, n, m, dtype=torch.uint8, device=x_EMN.device)
    across, tiles = cdiv(n, TILE), cdiv(m, TILE) * cdiv(n, TILE)
    parts = _parts(experts, tiles, x_EMN.device)
    launch(
        _cast_both,
        experts * tiles,
        x_EMN.device,
        x_EMN,
        scale,
        rows,
        columns,
        parts,
        m,
        n,
        across,
        tiles,
        0 if scale.numel() == 1 else 1,
        PER_ROW=scale.numel() == m and experts == 1 and m > 1,
        TILE=TILE,
        **_format(kind),
        num_warps=8,
    )
    return rows.view(DTYPES[kind]), columns.view(DTYPES[kind]), parts


def quantize_both(x_EMN: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fp8.quantize_both`, for a stack of matrices: codes and scales along rows, then those of
    the transposed matrices. Scales lie in memory group by group, as products take them."""
    x_EMN = x_EMN.contiguous()
    experts, m, n = x_EMN.shape
    device = x_EMN.device
    rows = torch.empty(experts, m, n, dtype=torch.uint8, device=device)
    columns = torch.empty(experts, n, m, dtype=torch.uint8, device=device)
    row_scales = torch.empty(experts, cdiv(n, group), m, dtype=torch.float32, device=device)
    column_scales = torch.empty(experts, cdiv(m, group), n, dtype=torch.float32, device=device)
    tile = max(group, TILE)
    across, tiles = cdiv(n, tile), cdiv(m, tile) * cdiv(n, tile)
    launch(
        _quantize_both,
        experts * tiles,
        device,
        x_EMN,
        rows,
        columns,
        row_scales,
        column_scales,
        m,
        n,
        across,
        tiles,
        GROUP=group,
        TILE=tile,
        **_format(kind),
        num_warps=8,
    )
    dtype = DTYPES[kind]
    return (
        rows.view(dtype),
        row_scales.transpose(1, 2),
        columns.view(dtype),
        column_scales.transpose(1, 2),
    )


def quantize_squares(x_EMN: Tensor, kind: str, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8.quantize_squares`, for a stack of matrices: codes, those of the transposed matrices,
    and a scale for each block."""
    x_EMN = x_EMN.contiguous()
    experts, m, n = x_EMN.shape
    device = x_EMN.device
    rows = torch.empty(experts, m, n, dtype=torch.uint8, device=device)
    columns = torch.empty(experts, n, m, dtype=torch.uint8, device=device)
    across, tiles = cdiv(n, block), cdiv(m, block) * cdiv(n, block)
    scales = torch.empty(experts, cdiv(m, block), across, dtype=torch.float32, device=device)
    launch(
        _quantize_squares,
        experts * tiles,
        device,
        x_EMN,
        rows,
        columns,
        scales,
        m,
        n,
        across,
        tiles,
        TILE=block,
        **_format(kind),
        num_warps=8,
    )
    return rows.view(DTYPES[kind]), columns.view(DTYPES[kind]), scales


def scale_of(x_EMN: Tensor, kind: str, margin: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8.current_scale`: amax, scale and its reciprocal of each matrix of a stack, [E] each,
    in two launches."""
    x_EMN = x_EMN.contiguous()
    experts, size = x_EMN.shape[0], x_EMN.shape[1] * x_EMN.shape[2]
    block = min(AMAX_BLOCK, power(size))
    programs = cdiv(size, block)
    parts = _parts(experts, programs, x_EMN.device)
    sizes = {"BLOCK": block, "num_warps": warps(block)}
    launch(_amax, experts * programs, x_EMN.device, x_EMN, parts, size, programs, **sizes)
    out = torch.empty(3, experts, dtype=torch.float32, device=x_EMN.device)
    launch(
        _scale,
        experts,
        x_EMN.device,
        parts,
        out,
        parts.shape[1],
        experts,
        2.0**margin,
        LARGEST=FORMATS[kind][2],
        BLOCK=1024,
        num_warps=4,
    )
    return out[0], out[1], out[2]


def record_amax(parts: Tensor, scale: Tensor, history: Tensor | None) -> Tensor:
    """See `fp8.record_amax`, in one launch."""
    inverse = torch.empty((), dtype=torch.float32, device=parts.device)
    launch(
        _record,
        1,
        parts.device,
        parts,
        scale,
        parts if history is None else history,
        inverse,
        parts.numel(),
        HAS_HISTORY=history is not None,
        BLOCK=1024,
        num_warps=4,
    )
    return inverse


def _parts(experts: int, parts: int, device: torch.device) -> Tensor:
    """A number for each program, which writes it; a zero where there are none."""
    make = torch.empty if parts else torch.zeros
    return make(experts, max(parts, 1), dtype=torch.float32, device=device)


def _format(kind: str) -> dict[str, float]:
    mantissa, bias, largest, nan = FORMATS[kind]
    return {"MANTISSA": mantissa, "BIAS": bias, "LARGEST": largest, "NAN": nan}


def _cast_both(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    across: tl.tensor,
    tiles: tl.tensor,
    step: tl.tensor,
    PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """One tile of one matrix, by the scale of rows or of the matrix (`step` is 1 if each has its
    own)."""
    program = tl.program_id(0).to(tl.int64)
    expert, tile = program // tiles, program % tiles
    row = (tile // across) * TILE + tl.arange(0, TILE)
    column = (tile % across) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < n)[None, :]
    offsets = expert * m * n + row[:, None] * n + column[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    is_nan = x != x
    largest = tl.max(tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 1), 0)
    broken = tl.max(tl.max(is_nan.to(tl.int32), 1), 0) > 0
    tl.store(parts_ptr + program, tl.where(broken, float("nan"), largest))
    if PER_ROW:
        scale = tl.load(scale_ptr + row, mask=row < m, other=1.0)[:, None]
    else:
        scale = tl.load(scale_ptr + expert * step)
    code = _encode(x * scale, MANTISSA, BIAS, LARGEST, NAN)
    tl.store(rows_ptr + offsets, code, mask=inside)
    turned = expert * m * n + column[:, None] * m + row[None, :]
    inside = (column < n)[:, None] & (row < m)[None, :]
    tl.store(columns_ptr + turned, tl.trans(code), mask=inside)


def _quantize_both(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    across: tl.tensor,
    tiles: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """One tile of one matrix, with a scale for each group along its rows, and along its columns.

    Both ways round from the original values, so that each has its own codes.
    """
    program = tl.program_id(0).to(tl.int64)
    expert, tile = program // tiles, program % tiles
    groups: tl.constexpr = TILE // GROUP
    row = (tile // across) * TILE + tl.arange(0, TILE)
    column = (tile % across) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < n)[None, :]
    offsets = expert * m * n + row[:, None] * n + column[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    group = (tile % across) * groups + tl.arange(0, groups)
    parts = tl.reshape(x, [TILE, groups, GROUP])
    scale = _power_of_two(_largest(parts, 2), LARGEST)
    code = tl.reshape(
        _encode(parts * scale[:, :, None], MANTISSA, BIAS, LARGEST, NAN), [TILE, TILE]
    )
    tl.store(rows_ptr + offsets, code, mask=inside)
    num_groups = (n + GROUP - 1) // GROUP
    places = expert * num_groups * m + group[None, :] * m + row[:, None]
    there = (row < m)[:, None] & (group < num_groups)[None, :]
    tl.store(row_scales_ptr + places, tl.div_rn(1.0, scale), mask=there)
    group = (tile // across) * groups + tl.arange(0, groups)
    parts = tl.reshape(x, [groups, GROUP, TILE])
    scale = _power_of_two(_largest(parts, 1), LARGEST)
    code = tl.reshape(
        _encode(parts * scale[:, None, :], MANTISSA, BIAS, LARGEST, NAN), [TILE, TILE]
    )
    turned = expert * m * n + column[:, None] * m + row[None, :]
    inside = (column < n)[:, None] & (row < m)[None, :]
    tl.store(columns_ptr + turned, tl.trans(code), mask=inside)
    num_groups = (m + GROUP - 1) // GROUP
    places = expert * num_groups * n + group[:, None] * n + column[None, :]
    there = (group < num_groups)[:, None] & (column < n)[None, :]
    tl.store(column_scales_ptr + places, tl.div_rn(1.0, scale), mask=there)


def _quantize_squares(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    across: tl.tensor,
    tiles: tl.tensor,
    TILE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
) -> None:
    """One block of one matrix, which has one scale."""
    program = tl.program_id(0).to(tl.int64)
    expert, tile = program // tiles, program % tiles
    row = (tile // across) * TILE + tl.arange(0, TILE)
    column = (tile % across) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < n)[None, :]
    offsets = expert * m * n + row[:, None] * n + column[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = _power_of_two(tl.max(_largest(x, 1), 0), LARGEST)
    code = _encode(x * scale, MANTISSA, BIAS, LARGEST, NAN)
    tl.store(rows_ptr + offsets, code, mask=inside)
    turned = expert * m * n + column[:, None] * m + row[None, :]
    inside = (column < n)[:, None] & (row < m)[None, :]
    tl.store(columns_ptr + turned, tl.trans(code), mask=inside)
    tl.store(scales_ptr + program, tl.div_rn(1.0, scale))


def _amax(
    x_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    size: tl.tensor,
    programs: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The amax of one block of one matrix, NaN where it holds one."""
    program = tl.program_id(0).to(tl.int64)
    offsets = (program % programs) * BLOCK + tl.arange(0, BLOCK)
    places = (program // programs) * size + offsets
    x = tl.load(x_ptr + places, mask=offsets < size, other=0.0).to(tl.float32)
    tl.store(parts_ptr + program, _worst(x))


def _scale(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_parts: tl.tensor,
    experts: tl.tensor,
    divisor: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Amax, scale and reciprocal of one matrix, out of the amaxes of its parts."""
    expert = tl.program_id(0)
    amax = _worst_part(parts_ptr + expert * num_parts, num_parts, BLOCK)
    is_sound = (amax > 0) & (amax < float("inf"))
    scale = tl.div_rn(tl.div_rn(LARGEST, tl.where(is_sound, amax, 1.0)), divisor)
    scale = tl.where(is_sound, tl.minimum(scale, 3.4028234663852886e38), 1.0)
    tl.store(out_ptr + expert, amax)
    tl.store(out_ptr + experts + expert, scale)
    tl.store(out_ptr + 2 * experts + expert, tl.div_rn(1.0, scale))


def _record(
    parts_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    history_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    num_parts: tl.tensor,
    HAS_HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The amax of a tensor into its history, and the reciprocal of the scale it was cast with."""
    tl.store(inverse_ptr, tl.div_rn(1.0, tl.load(scale_ptr)))
    if HAS_HISTORY:
        amax = _worst_part(parts_ptr, num_parts, BLOCK)
        before = tl.load(history_ptr)
        is_nan = (amax != amax) | (before != before)
        tl.store(history_ptr, tl.where(is_nan, float("nan"), tl.maximum(amax, before)))


def _worst_part(parts_ptr: tl.tensor, num_parts: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest of the amaxes of parts, NaN where one is."""
    worst = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_parts, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        part = tl.load(parts_ptr + offsets, mask=offsets < num_parts, other=0.0)
        worst = tl.where((worst != worst) | (part != part), float("nan"), tl.maximum(worst, part))
    return _worst(worst)


def _largest(x: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """The largest magnitudes along a dim; infinite where there is a NaN, so that none is lost."""
    return tl.max(tl.where(x != x, float("inf"), tl.abs(x)), DIM)


def _worst(x: tl.tensor) -> tl.tensor:
    """The largest magnitude of a row of numbers, NaN where it holds one."""
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 0)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), largest)


def _power_of_two(amax: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The largest power of two that takes an amax below FP8's largest value; 1 where it cannot."""
    is_sound = (amax > 0) & (amax < float("inf"))
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(is_sound, amax, 1.0)), 3.4028234663852886e38)
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(is_sound, power, 1.0)
