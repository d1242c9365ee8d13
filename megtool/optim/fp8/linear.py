"""A linear layer's products with FP8 operands, forward and backward (`kernels.fp8_products`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.errors import UsageError
from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.fp8.cast import Quantized
from megtool.kernels.fp8.products import add_product, multiply
from megtool.kernels.wgrad_accumulation import GradientSum, gradient_sum
from megtool.optim.fp8.scaling import Fp8Scaling

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
    """`x W^T` for `x` `[..., I]` in x's dtype, from FP8 operands, and likewise both gradients.

    The weight's gradient goes straight to its sum (`kernels.wgrad_accumulation`) where it has one.
    """
    args = (x, weight_OI, scaling, torch.is_grad_enabled(), gradient_sum(weight_OI))
    out: Tensor = _Product.apply(*args)  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        scaling: Fp8Scaling,
        is_training: bool,
        total: GradientSum | None,
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
        ctx.total = total
        y = multiply(rows.rows, weight.rows, x.dtype, fast=True)
        return y.view(*x.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weight, weight_scale, rows, rows_scale = ctx.saved_tensors
        of_weight, of_rows = ctx.blocks
        if weight is None and rows is None:
            return None, None, None, None, None
        with use(ctx.asked):
            grad = ctx.scaling.gradient(g.reshape(-1, g.shape[-1]))
        gx = gw_OI = None
        if weight is not None:
            q = Quantized(data=weight, scale_inv=weight_scale, block=of_weight)
            gx = multiply(grad.rows, q, g.dtype).view(*g.shape[:-1], -1)
        if rows is not None:
            q = Quantized(data=rows, scale_inv=rows_scale, block=of_rows)
            if ctx.total is None:
                gw_OI = multiply(grad.columns, q, ctx.dtype)
            else:
                add_product(ctx.total, grad.columns, q, ctx.dtype)
        return gx, gw_OI, None, None, None
