"""Saturating casts to FP8, scaled per tensor or per block of 128, with the amax.

A scale multiplies before the cast (Transformer Engine's sense); its reciprocal, `scale_inv`, is
what is stored and what gives the value back. The cast rounds to nearest, ties to even, exactly as
torch's own; values beyond the largest finite one become that (torch alone makes them NaN or
infinite), NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.dispatch import Kernel
from megtool.kernels.fp8 import cast_triton as fp8_triton

Kind = Literal["e4m3", "e5m2"]
DTYPES: dict[Kind, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST: dict[Kind, float] = {"e4m3": 448.0, "e5m2": 57344.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A tensor in FP8: data (x's shape), scale_inv (fp32: 0-d, or one per block), blocks.

    `block` is (0, 0) for one scale per tensor, or scales of a shape that broadcasts to x's, else
    the rows and columns of a block of the last two dims; blocks at the edges may be smaller.
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int] = (0, 0)


def cast_fp8(x: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """`x * scale` (in fp32) in FP8, and amax: the largest absolute value of x, 0-d fp32.

    One pass over x: the scale is given ahead (delayed scaling), the amax makes the next one. A NaN
    in x makes the amax NaN; an empty x has an amax of 0.
    """
    _dtype(kind)
    return _CAST.on(x.device)(x, scale, kind)


def amax(x: Tensor) -> Tensor:
    """The largest absolute value, 0-d fp32; 0 where x is empty, NaN where x holds one."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return x.abs().amax().float()


def scale_from_amax(
    largest: Tensor, kind: Kind, *, margin: int = 0, power_of_two: bool = False
) -> Tensor:
    """The scale that takes `largest` to FP8's largest value, over 2^margin; 1 where it cannot.

    That is where amax is 0, infinite or NaN; where the quotient overflows fp32 the scale is fp32's
    largest value. `power_of_two` rounds down to one, so that scaling is exact.
    """
    _dtype(kind)
    # A number over a tensor would be its reciprocal times the number, rounded twice.
    scale = torch.full_like(largest, LARGEST[kind], dtype=torch.float32) / largest.float()
    scale = scale / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((largest > 0) & largest.isfinite(), scale, torch.ones_like(scale))


def quantize_tensor(
    x: Tensor, kind: Kind, *, margin: int = 0, power_of_two: bool = False
) -> Quantized:
    """One scale for the whole tensor, from its own amax (current scaling)."""
    scale = scale_from_amax(amax(x), kind, margin=margin, power_of_two=power_of_two)
    data, _ = cast_fp8(x, scale, kind)
    return Quantized(data=data, scale_inv=scale.reciprocal())


def quantize_blocks(
    x_MN: Tensor, kind: Kind, *, block: tuple[int, int] = (128, 128), power_of_two: bool = False
) -> Quantized:
    """One scale per block of a matrix (or of each of a stack): (128, 128) for weights, (1, 128) for
    activations.

    scale_inv has the shape [..., ceil(M / rows), ceil(N / columns)].
    """
    if x_MN.dim() < 2 or min(block) < 1:
        raise UsageError(f"blocks {block} cannot cut a tensor of shape {tuple(x_MN.shape)}")
    scale = scale_from_amax(block_amax(x_MN, block), kind, power_of_two=power_of_two)
    scaled = x_MN.float() * spread_scale(scale, block, x_MN.shape)
    return Quantized(data=_saturate(scaled, kind), scale_inv=scale.reciprocal(), block=block)


def current_scale(x: Tensor, kind: Kind, *, margin: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix's amax, the scale from it (`scale_from_amax`) and the scale's reciprocal:
    0-d fp32, or [E] for a stack [E, M, N]."""
    _dtype(kind)
    results = _CURRENT_SCALE.on(x.device)(_stacked(x), kind, margin)
    return results if x.dim() == 3 else (results[0][0], results[1][0], results[2][0])


def cast_both(x: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x * scale` in FP8, the same codes transposed, and amaxes of parts, in one pass.

    x is [M, N], with one scale (0-d) or one for each row ([M, 1]), or [E, M, N] with one for each
    matrix ([E]). The parts' amaxes, fp32 [E, parts] (E of a matrix is 1), are NaN where x holds
    one. On a CPU the transposed codes are a view.
    """
    _dtype(kind)
    rows, columns, parts = _CAST_BOTH.on(x.device)(_stacked(x), scale.reshape(-1), kind)
    return (rows, columns, parts) if x.dim() == 3 else (rows[0], columns[0], parts)


def record_amax(parts: Tensor, scale: Tensor, history: Tensor | None) -> Tensor:
    """Return the reciprocal of a 0-d scale, and record an amax.

    `history` (0-d fp32, if there is one) is raised in place to the largest of the amaxes that
    `cast_both` returns for a matrix.
    """
    return _RECORD_AMAX.on(parts.device)(parts, scale, history)


def quantize_both(x: Tensor, kind: Kind, *, group: int) -> tuple[Quantized, Quantized]:
    """Quantize a matrix, or each of a stack, with a power of two for `group` elements of a row; and
    transposed, with one for `group` elements of a column, in one pass.

    Both are rounded from the original values: `quantize_blocks` of x and of its transpose.
    """
    _dtype(kind)
    results = _QUANTIZE_BOTH.on(x.device)(_stacked(x), kind, group)
    rows, rows_inv, columns, columns_inv = results if x.dim() == 3 else (r[0] for r in results)
    return (
        Quantized(data=rows, scale_inv=rows_inv, block=(1, group)),
        Quantized(data=columns, scale_inv=columns_inv, block=(1, group)),
    )


def quantize_squares(x: Tensor, kind: Kind, *, block: int) -> tuple[Quantized, Quantized]:
    """Quantize a matrix, or each of a stack, with a power of two for `block` x `block` elements.

    The second result has the same codes transposed. One pass: see `quantize_blocks`.
    """
    _dtype(kind)
    results = _QUANTIZE_SQUARES.on(x.device)(_stacked(x), kind, block)
    rows, columns, scale_inv = results if x.dim() == 3 else (r[0] for r in results)
    square = (block, block)
    return (
        Quantized(data=rows, scale_inv=scale_inv, block=square),
        Quantized(data=columns, scale_inv=scale_inv.transpose(-1, -2), block=square),
    )


def _stacked(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of FP8 data: multiplied in fp32, rounded once to `dtype`."""
    scale_inv = q.scale_inv
    if q.block != (0, 0):
        scale_inv = spread_scale(scale_inv, q.block, q.data.shape)
    return (q.data.float() * scale_inv).to(dtype)


def _cast_fp8(x: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """The reference of `cast_fp8`."""
    wide = x.float()
    return _saturate(wide * scale, kind), amax(wide)


def _saturate(scaled: Tensor, kind: Kind) -> Tensor:
    """Round fp32 values to FP8; values beyond the largest one are clamped to it."""
    return scaled.clamp(-LARGEST[kind], LARGEST[kind]).to(DTYPES[kind])


def _dtype(kind: Kind) -> torch.dtype:
    """The torch dtype of `kind`; UsageError where there is none."""
    if kind not in DTYPES:
        raise UsageError(f"the FP8 kind {kind!r} is unknown", hint=f"known: {', '.join(DTYPES)}")
    return DTYPES[kind]


def block_amax(x_MN: Tensor, block: tuple[int, int]) -> Tensor:
    """The amax of every block, fp32 [..., ceil(M / rows), ceil(N / columns)]."""
    rows, columns = block
    *stack, m, n = x_MN.shape
    padded = torch.nn.functional.pad(x_MN.float(), (0, -n % columns, 0, -m % rows))
    sizes = padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns
    tiles = padded.view(*stack, *sizes)
    if not tiles.numel():
        return tiles.new_zeros(*stack, sizes[0], sizes[2])
    return tiles.abs().amax((-3, -1))


def spread_scale(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One scale per element, from one per block."""
    rows, columns = block
    spread = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return spread.repeat_interleave(columns, -1)[..., : shape[-1]]


def _current_scale(x_EMN: Tensor, kind: Kind, margin: int) -> tuple[Tensor, Tensor, Tensor]:
    if x_EMN.numel():
        largest = x_EMN.abs().amax((1, 2)).float()
    else:
        largest = torch.zeros(x_EMN.shape[0], device=x_EMN.device)
    scale = scale_from_amax(largest, kind, margin=margin)
    return largest, scale, scale.reciprocal()


def _cast_both(x_EMN: Tensor, scale: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    wide = x_EMN.float()
    is_rowwise = len(x_EMN) == 1 and scale.numel() > 1
    spread = scale.view(1, -1, 1) if is_rowwise else scale.view(-1, 1, 1)
    data = _saturate(wide * spread, kind)
    parts = wide.abs().amax((1, 2)) if x_EMN.numel() else wide.new_zeros(len(x_EMN))
    return data, data.transpose(1, 2), parts.unsqueeze(1)


def _record_amax(parts: Tensor, scale: Tensor, history: Tensor | None) -> Tensor:
    if history is not None:
        torch.maximum(history, parts.amax(), out=history)
    return scale.reciprocal()


def _quantize_both(x_EMN: Tensor, kind: Kind, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = (
        quantize_blocks(x, kind, block=(1, group), power_of_two=True)
        for x in (x_EMN, x_EMN.transpose(1, 2))
    )
    return rows.data, rows.scale_inv, columns.data, columns.scale_inv


def _quantize_squares(x_EMN: Tensor, kind: Kind, block: int) -> tuple[Tensor, Tensor, Tensor]:
    q = quantize_blocks(x_EMN, kind, block=(block, block), power_of_two=True)
    return q.data, q.data.transpose(1, 2), q.scale_inv


_CAST = Kernel("cast to FP8", _cast_fp8, triton=fp8_triton.cast_fp8)
_CURRENT_SCALE = Kernel("scale of a tensor", _current_scale, triton=fp8_triton.scale_of)
_CAST_BOTH = Kernel("cast to FP8 both ways", _cast_both, triton=fp8_triton.cast_both)
_RECORD_AMAX = Kernel("amax into a history", _record_amax, triton=fp8_triton.record_amax)
_QUANTIZE_BOTH = Kernel("FP8 groups both ways", _quantize_both, triton=fp8_triton.quantize_both)
_QUANTIZE_SQUARES = Kernel(
    "FP8 blocks both ways", _quantize_squares, triton=fp8_triton.quantize_squares
)
