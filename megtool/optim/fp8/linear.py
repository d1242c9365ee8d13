"""A linear layer's products with FP8 operands, forward and backward.

On CUDA, operands with one scale each are multiplied as FP8 (`torch._scaled_mm`). Blockwise operands
are multiplied as bf16, which represents FP8 times a power of two exactly: the numbers of the
recipe, not its speed. On a CPU all operands are multiplied as fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.errors import UsageError
from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.fp8 import Quantized, dequantize
from megtool.optim.fp8.scaling import Fp8Scaling

_MULTIPLE = 16  # what FP8 products on CUDA need rows, columns and sums to be
LEAST_CAPABILITY = (8, 9)
"""GPUs with FP8 products: Ada, Hopper and later. Source: NVIDIA's CUDA programming guide."""


def require_products(device: torch.device) -> None:
    """Check that a device can multiply FP8.

    Raises:
        UsageError: the CUDA device is too old.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"{name} cannot multiply FP8",
            hint="omit --fp8-recipe; FP8 needs compute capability 8.9 or later",
        )


def fp8_product(x: Tensor, weight_OI: Tensor, scaling: Fp8Scaling) -> Tensor:
    """`x W^T` for `x` `[..., I]` in x's dtype, from FP8 operands, and likewise both gradients."""
    args = (x, weight_OI, scaling, torch.is_grad_enabled())
    out: Tensor = _Product.apply(*args)  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, scaling: Fp8Scaling, is_training: bool
    ) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        rows = scaling.input(x_TI, is_training=is_training)
        weight = scaling.weight(weight_OI, is_training=is_training)
        # The backward pass needs one byte per element of these; nothing else is saved.
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        saved: list[Tensor | None] = [None] * 4
        if wants_x:
            saved[:2] = weight.columns.data, weight.columns.scale_inv
        if wants_weight:
            saved[2:] = rows.columns.data, rows.columns.scale_inv
        ctx.save_for_backward(*saved)
        ctx.blocks = weight.columns.block, rows.columns.block
        ctx.scaling, ctx.dtype, ctx.asked = scaling, weight_OI.dtype, requested_implementation()
        y = multiply(rows.rows, weight.rows, x.dtype, fast=True)
        return y.view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, weight_scale, rows, rows_scale = ctx.saved_tensors
        of_weight, of_rows = ctx.blocks
        if weight is None and rows is None:
            return None, None, None, None
        with use(ctx.asked):
            grad = ctx.scaling.gradient(g.reshape(-1, g.shape[-1]))
        gx = gw_OI = None
        if weight is not None:
            q = Quantized(data=weight, scale_inv=weight_scale, block=of_weight)
            gx = multiply(grad.rows, q, g.dtype).view(*g.shape[:-1], -1)
        if rows is not None:
            q = Quantized(data=rows, scale_inv=rows_scale, block=of_rows)
            gw_OI = multiply(grad.columns, q, ctx.dtype)
        return gx, gw_OI, None, None


def multiply(a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a b^T`, `[M, N]`, of FP8 operands, summed in fp32 and rounded to `dtype`.

    `fast` lets CUDA sum with fewer bits, as Transformer Engine does in the forward pass.
    """
    if a_MK.data.device.type == "cpu":
        return (dequantize(a_MK) @ dequantize(b_NK).t()).to(dtype)
    if a_MK.block != (0, 0):
        wide = torch.float32 if dtype == torch.float32 else torch.bfloat16
        product = dequantize(a_MK, wide) @ dequantize(b_NK, wide).t()
        return product.to(dtype)
    m, n = a_MK.data.shape[0], b_NK.data.shape[0]
    a, b = _padded(a_MK.data), _padded(b_NK.data)
    product = torch._scaled_mm(
        a,
        b.t(),
        scale_a=a_MK.scale_inv,
        scale_b=b_NK.scale_inv,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product[:m, :n]


def _padded(data: Tensor) -> Tensor:
    """Pad rows and columns with zeros to multiples of 16; the result is contiguous."""
    rows, columns = data.shape
    if rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0:
        return data.contiguous()
    pad = (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE)
    return F.pad(data.contiguous().view(torch.uint8), pad).view(data.dtype)
