"""Triton kernel of the FP8 cast: scale, saturate, round and compute the amax in one pass.

Rounding is done on the bits, so that it needs no FP8 hardware and is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, launch

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
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
    """One block of elements.

    A normal number's code is its fp32 bits with the exponent's bias changed, rounded to nearest
    even by adding half of the last kept bit (less one if that bit is 0). Below the smallest normal
    number, adding the power of two whose last mantissa bit is FP8's smallest step lets the
    addition do the rounding.
    """
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    size_x = tl.abs(x)
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, 0.0, size_x), 0)
    broken = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(parts_ptr + program, tl.where(broken, float("nan"), largest))
    scaled = x * tl.load(scale_ptr)
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
    anchor = tl.full([BLOCK], pivot, tl.int32).to(tl.float32, bitcast=True)
    small = (near + anchor).to(tl.int32, bitcast=True) - pivot
    smallest: tl.constexpr = (128 - BIAS) << 23  # the smallest normal number's fp32 bits
    code = tl.where(bits < smallest, small, normal)
    code = tl.where(is_nan, NAN, code) | sign
    tl.store(out_ptr + offsets, code.to(tl.uint8), mask=offsets < size)
