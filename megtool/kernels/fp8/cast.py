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


_CAST = Kernel("cast to FP8", _cast_fp8, triton=fp8_triton.cast_fp8)
