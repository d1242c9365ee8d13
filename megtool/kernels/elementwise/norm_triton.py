"""Triton kernels of RMSNorm and LayerNorm, forward and backward, with the residual addition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, most_programs, tile

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """See `norm.rms_norm`."""
    out: Tensor = _Norm.apply(x, None, weight, None, eps, zero_centered, False)  # type: ignore[no-untyped-call]
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """See `norm.layer_norm`."""
    out: Tensor = _Norm.apply(x, None, weight, bias, eps, zero_centered, True)  # type: ignore[no-untyped-call]
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`."""
    out: tuple[Tensor, Tensor] = _Norm.apply(x, residual, weight, None, eps, zero_centered, False)  # type: ignore[no-untyped-call]
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """See `norm.add_layer_norm`."""
    out: tuple[Tensor, Tensor] = _Norm.apply(x, residual, weight, bias, eps, zero_centered, True)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    """Both norms; it keeps its input (or the sum) and two numbers a row for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        zero_centered: bool,
        centered: bool,
    ) -> Any:
        size = x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x
        if residual is not None:
            kind = torch.promote_types(x.dtype, residual.dtype)
            total = torch.empty_like(x, dtype=kind)
        num_rows = x.numel() // size
        acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean = torch.empty(num_rows if centered else 0, dtype=acc_dtype, device=x.device)
        inverse = torch.empty(num_rows, dtype=acc_dtype, device=x.device)
        sizes = tile(size)
        launch(
            _forward,
            cdiv(num_rows, sizes["ROWS"]),
            x.device,
            x,
            x if residual is None else residual.contiguous(),
            x if weight is None else weight,
            x if bias is None else bias,
            out,
            total,
            mean,
            inverse,
            num_rows,
            size,
            eps,
            ADD=residual is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            PLUS_ONE=zero_centered,
            CENTERED=centered,
            ACC=accumulator(x),
            **sizes,
        )
        ctx.save_for_backward(total, weight, mean, inverse)
        ctx.kind = (zero_centered, centered, None if bias is None else bias.dtype)
        ctx.added = residual is not None
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        return (out, total) if ctx.added else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        zero_centered, centered, bias_dtype = ctx.kind
        size = x.shape[-1]
        num_rows = x.numel() // size
        grad = x.new_zeros(x.shape) if grads[0] is None else grads[0].contiguous()
        grad_sum = grads[1].contiguous() if ctx.added and grads[1] is not None else None
        sizes = tile(size)
        programs = max(1, min(cdiv(num_rows, sizes["ROWS"]), most_programs(x.device)))
        parts = torch.empty(
            (0 if weight is None else programs, size), dtype=inverse.dtype, device=x.device
        )
        shifts = torch.empty(
            (0 if bias_dtype is None else programs, size), dtype=inverse.dtype, device=x.device
        )
        dx = torch.empty_like(x)
        launch(
            _backward,
            programs,
            x.device,
            x,
            grad,
            grad if grad_sum is None else grad_sum,
            x if weight is None else weight,
            mean,
            inverse,
            dx,
            parts,
            shifts,
            num_rows,
            size,
            programs,
            ADD=grad_sum is not None,
            WEIGHT=weight is not None,
            BIAS=bias_dtype is not None,
            PLUS_ONE=zero_centered,
            CENTERED=centered,
            ACC=accumulator(x),
            **sizes,
        )
        dtype, residual_dtype = ctx.dtypes
        return (
            dx.to(dtype),
            dx.to(residual_dtype) if ctx.added else None,
            None if weight is None else parts.sum(0).to(weight.dtype),
            None if bias_dtype is None else shifts.sum(0).to(bias_dtype),
            None,
            None,
            None,
        )


def _forward(
    x_ptr: Any,
    residual_ptr: Any,
    weight_ptr: Any,
    bias_ptr: Any,
    out_ptr: Any,
    sum_ptr: Any,
    mean_ptr: Any,
    inverse_ptr: Any,
    num_rows: Any,
    size: Any,
    eps: Any,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CENTERED: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tile of ROWS full rows per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (col < size)[None, :]
    offsets = row[:, None] * size + col[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC)
    if ADD:
        x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(ACC)
        # The norm is of the sum as it is stored, so that backward sees the same numbers.
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask=inside)
        x = rounded.to(ACC)
    if CENTERED:
        mean = tl.sum(x, 1) / size
        tl.store(mean_ptr + row, mean, mask=row < num_rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / size + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < num_rows)
    out = x * inverse[:, None]
    if WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < size, other=0.0).to(ACC)
        if PLUS_ONE:
            weight += 1.0
        out = out * weight[None, :]
    if BIAS:
        out += tl.load(bias_ptr + col, mask=col < size, other=0.0).to(ACC)[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def _backward(
    x_ptr: Any,
    grad_ptr: Any,
    grad_sum_ptr: Any,
    weight_ptr: Any,
    mean_ptr: Any,
    inverse_ptr: Any,
    dx_ptr: Any,
    parts_ptr: Any,
    shifts_ptr: Any,
    num_rows: Any,
    size: Any,
    num_programs: Any,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CENTERED: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Every num_programs-th tile; each program leaves its own sums for weight and bias.

    With n the normalized row and d the gradient times the weight: dx = (d - n mean(d n)) * inverse,
    and for LayerNorm d less its mean. The sums are added up afterwards, always in one order.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    part = tl.zeros([BLOCK], dtype=ACC)
    shift = tl.zeros([BLOCK], dtype=ACC)
    weight = tl.full([BLOCK], 1.0, dtype=ACC)
    if WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < size, other=0.0).to(ACC)
        if PLUS_ONE:
            weight += 1.0
    for first in range(program * ROWS, num_rows, num_programs * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        live = row < num_rows
        inside = live[:, None] & (col < size)[None, :]
        offsets = row[:, None] * size + col[None, :]
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC)
        grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(ACC)
        inverse = tl.load(inverse_ptr + row, mask=live, other=0.0)
        if CENTERED:
            x = x - tl.load(mean_ptr + row, mask=live, other=0.0)[:, None]
        norm = tl.where(inside, x * inverse[:, None], 0.0)
        if WEIGHT:
            part += tl.sum(grad * norm, 0)
        if BIAS:
            shift += tl.sum(grad, 0)
        scaled = tl.where(inside, grad * weight[None, :], 0.0)
        dx = scaled - norm * (tl.sum(scaled * norm, 1) / size)[:, None]
        if CENTERED:
            dx = dx - (tl.sum(scaled, 1) / size)[:, None]
        dx = dx * inverse[:, None]
        if ADD:
            dx += tl.load(grad_sum_ptr + offsets, mask=inside, other=0.0).to(ACC)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(parts_ptr + program * size + col, part, mask=col < size)
    if BIAS:
        tl.store(shifts_ptr + program * size + col, shift, mask=col < size)
