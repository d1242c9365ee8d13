"""Triton kernel of bias, dropout, scale and residual addition in one pass; stores no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, warps

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor, scale: float
) -> Tensor:
    """See `dropout_add.bias_dropout_add`."""
    values = (x, bias, residual, p, seed, scale)
    out: Tensor = _DropoutAdd.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _DropoutAdd(torch.autograd.Function):
    """It keeps the seed, and draws the same numbers again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        seed: Tensor,
        scale: float,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(seed)
        ctx.way = (p, scale, x.dtype, None if bias is None else bias.dtype)
        out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        launch(
            _forward,
            cdiv(x.numel(), _BLOCK),
            x.device,
            x,
            x if bias is None else bias,
            residual.contiguous(),
            out,
            seed,
            x.numel(),
            x.shape[-1],
            p,
            _factor(p, scale),
            BIAS=bias is not None,
            DROP=p > 0,
            ACC=accumulator(x),
            BLOCK=_BLOCK,
            num_warps=warps(_BLOCK),
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        p, scale, dtype, bias_dtype = ctx.way
        (seed,), grad = ctx.saved_tensors, grads[0]
        dx = grad.to(dtype)
        if p or scale != 1:
            grad = grad.contiguous()
            dx = torch.empty_like(grad, dtype=dtype)
            launch(
                _backward,
                cdiv(grad.numel(), _BLOCK),
                grad.device,
                grad,
                dx,
                seed,
                grad.numel(),
                p,
                _factor(p, scale),
                DROP=p > 0,
                ACC=accumulator(grad),
                BLOCK=_BLOCK,
                num_warps=warps(_BLOCK),
            )
        shift = None
        if bias_dtype is not None:
            acc_dtype = torch.promote_types(dtype, torch.float32)
            shift = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=acc_dtype).to(bias_dtype)
        return dx, shift, grads[0], None, None, None


def _factor(p: float, scale: float) -> float:
    """The scale of the elements that dropout keeps."""
    return scale / (1 - p) if p < 1 else 0.0


def _forward(
    x_ptr: Any,
    bias_ptr: Any,
    residual_ptr: Any,
    out_ptr: Any,
    seed_ptr: Any,
    num_elements: Any,
    size: Any,
    p: Any,
    factor: Any,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements a program; `factor` is the scale, and with dropout divided by 1 - p."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC)
    if BIAS:
        x += tl.load(bias_ptr + offsets % size, mask=inside, other=0.0).to(ACC)
    x = x * factor
    if DROP:
        x = tl.where(tl.rand(tl.load(seed_ptr), offsets) < p, 0.0, x)
    x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(ACC)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


def _backward(
    grad_ptr: Any,
    dx_ptr: Any,
    seed_ptr: Any,
    num_elements: Any,
    p: Any,
    factor: Any,
    DROP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The same elements draw the same numbers."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(ACC) * factor
    if DROP:
        grad = tl.where(tl.rand(tl.load(seed_ptr), offsets) < p, 0.0, grad)
    tl.store(dx_ptr + offsets, grad.to(dx_ptr.dtype.element_ty), mask=inside)
