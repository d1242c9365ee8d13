"""Triton kernels of plain and gated activations, with bias, limit and offset, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl


def activate(x_TF: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    """See `activation.activate`."""
    out: Tensor = _Activate.apply(x_TF, bias, kind, False, 0.0, 0.0)  # type: ignore[no-untyped-call]
    return out


def gated(x_T2F: Tensor, kind: str, bias: Tensor | None, limit: float, offset: float) -> Tensor:
    """See `activation.gated`."""
    out: Tensor = _Activate.apply(x_T2F, bias, kind, True, limit, offset)  # type: ignore[no-untyped-call]
    return out


class _Activate(torch.autograd.Function):
    """Saves only its input, and recomputes the activation in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        kind: str,
        is_gated: bool,
        limit: float,
        offset: float,
    ) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1] // 2 if is_gated else x.shape[-1]
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
        ctx.save_for_backward(x, bias)
        ctx.way = (kind, is_gated, limit, offset)
        num_programs, sizes = _tiling(out)
        launch(
            _forward,
            num_programs,
            x.device,
            x,
            x if bias is None else bias,
            out,
            size,
            limit,
            offset,
            KIND=kind,
            GATED=is_gated,
            BIAS=bias is not None,
            LIMIT=limit != 0,
            ACC=accumulator(x),
            **sizes,
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        kind, is_gated, limit, offset = ctx.way
        grad = grads[0].contiguous()
        dx = torch.empty_like(x)
        num_programs, sizes = _tiling(grad)
        launch(
            _backward,
            num_programs,
            x.device,
            x,
            x if bias is None else bias,
            grad,
            dx,
            grad.shape[-1],
            limit,
            offset,
            KIND=kind,
            GATED=is_gated,
            BIAS=bias is not None,
            LIMIT=limit != 0,
            ACC=accumulator(x),
            **sizes,
        )
        shift = None
        if bias is not None:
            acc_dtype = torch.promote_types(x.dtype, torch.float32)
            shift = dx.reshape(-1, x.shape[-1]).sum(0, dtype=acc_dtype).to(bias.dtype)
        return dx, shift, None, None, None, None


def _tiling(out: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs over `out`, and the columns of a row that each does."""
    size = out.shape[-1]
    block = min(power(size), 2048)
    blocks = cdiv(size, block)
    num_rows = out.numel() // size if size else 0
    return num_rows * blocks, {"BLOCK": block, "num_warps": warps(block)}


def _forward(
    x_ptr: Any,
    bias_ptr: Any,
    out_ptr: Any,
    size: Any,
    limit: Any,
    offset: Any,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one row a program."""
    blocks = (size + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    start = row * size
    if GATED:
        start = start * 2
    x = tl.load(x_ptr + start + col, mask=inside, other=0.0).to(ACC)
    if BIAS:
        x += tl.load(bias_ptr + col, mask=inside, other=0.0).to(ACC)
    if LIMIT:
        x = tl.where(x > limit, limit, x)
    out = _value(x, KIND)
    if GATED:
        up = tl.load(x_ptr + start + size + col, mask=inside, other=0.0).to(ACC)
        if BIAS:
            up += tl.load(bias_ptr + size + col, mask=inside, other=0.0).to(ACC)
        if LIMIT:
            up = tl.where(up > limit, limit, up)
            up = tl.where(up < -limit, -limit, up)
        out = out * (up + offset)
    tl.store(out_ptr + row * size + col, out.to(out_ptr.dtype.element_ty), mask=inside)


def _backward(
    x_ptr: Any,
    bias_ptr: Any,
    grad_ptr: Any,
    dx_ptr: Any,
    size: Any,
    limit: Any,
    offset: Any,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The same tiles; beyond a limit the slope is 0."""
    blocks = (size + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    start = row * size
    if GATED:
        start = start * 2
    kind = dx_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + col, mask=inside, other=0.0).to(ACC)
    grad = tl.load(grad_ptr + row * size + col, mask=inside, other=0.0).to(ACC)
    if BIAS:
        x += tl.load(bias_ptr + col, mask=inside, other=0.0).to(ACC)
    gate_input = x
    if LIMIT:
        x = tl.where(x > limit, limit, x)
    slope = _slope(x, KIND)
    if LIMIT:
        slope = tl.where(gate_input > limit, 0.0, slope)
    if GATED:
        up = tl.load(x_ptr + start + size + col, mask=inside, other=0.0).to(ACC)
        if BIAS:
            up += tl.load(bias_ptr + size + col, mask=inside, other=0.0).to(ACC)
        d_up = grad * _value(x, KIND)
        if LIMIT:
            d_up = tl.where((up > limit) | (up < -limit), 0.0, d_up)
            up = tl.where(up > limit, limit, up)
            up = tl.where(up < -limit, -limit, up)
        tl.store(dx_ptr + start + size + col, d_up.to(kind), mask=inside)
        grad = grad * (up + offset)
    tl.store(dx_ptr + start + col, (grad * slope).to(kind), mask=inside)


def _value(x: Any, KIND: tl.constexpr) -> Any:
    """The activation; NaN stays NaN."""
    if KIND == "relu":
        out = tl.where(x < 0.0, 0.0, x)
    elif KIND == "relu2":
        out = tl.where(x < 0.0, 0.0, x * x)
    elif KIND == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        out = x / (1.0 + tl.exp(-_inner(x, KIND)))
    return out


def _slope(x: Any, KIND: tl.constexpr) -> Any:
    """The activation's derivative."""
    if KIND == "relu":
        out = tl.where(x > 0.0, 1.0, 0.0 * x)
    elif KIND == "relu2":
        out = tl.where(x < 0.0, 0.0, 2.0 * x)
    elif KIND == "gelu":
        normal = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        out = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * normal
    else:
        # x * sigmoid(v(x)) has the slope s + x * s * (1 - s) * v'(x).
        s = 1.0 / (1.0 + tl.exp(-_inner(x, KIND)))
        if KIND == "silu":
            inner = 1.0
        elif KIND == "quick_gelu":
            inner = 1.702
        else:
            inner = 1.5957691216057308 + 0.21406444881780074 * x * x
        out = s + x * s * (1.0 - s) * inner
    return out


def _inner(x: Any, KIND: tl.constexpr) -> Any:
    """The v of the formulas that are `x * sigmoid(v(x))`; for tanh, (1 + tanh(u)) / 2 is
    sigmoid(2u)."""
    if KIND == "silu":
        out = x
    elif KIND == "quick_gelu":
        out = 1.702 * x
    else:
        out = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return out
