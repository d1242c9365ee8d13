"""Triton kernel of the masked softmax: scale, cap, mask and sinks while a row is in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl


def masked_softmax(
    scores_BNSQSK: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks_N: Tensor | None,
) -> Tensor:
    """See `softmax.masked_softmax`."""
    out: Tensor = _Softmax.apply(scores_BNSQSK, mask, scale, softcap, sinks_N)  # type: ignore[no-untyped-call]
    return out


class _Softmax(torch.autograd.Function):
    """It keeps its output, the scores only under a cap, and the share of a row's sink."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        scores = scores.contiguous()
        _, heads, queries, keys = scores.shape
        out = torch.empty_like(scores)
        num_rows = scores.numel() // keys if keys else 0
        acc_dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        share = torch.empty(0 if sinks is None else num_rows, dtype=acc_dtype, device=scores.device)
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask.expand(scores.shape)
            strides = mask.stride()
        launch(
            _forward,
            num_rows,
            scores.device,
            scores,
            scores if mask is None else mask,
            scores if sinks is None else sinks,
            out,
            share,
            heads,
            queries,
            keys,
            *strides,
            scale,
            softcap,
            MASK=mask is not None,
            CAP=softcap != 0,
            SINKS=sinks is not None,
            ACC=accumulator(scores),
            BLOCK=power(keys),
            num_warps=warps(power(keys)),
        )
        ctx.save_for_backward(scores if softcap else None, out, share)
        ctx.way = (scale, softcap, None if sinks is None else sinks.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scores, out, share = ctx.saved_tensors
        scale, softcap, sinks_dtype = ctx.way
        grad = grads[0].contiguous()
        dx = torch.empty_like(out)
        batch, heads, queries, keys = out.shape
        rows = torch.empty_like(share)
        launch(
            _backward,
            out.numel() // keys if keys else 0,
            out.device,
            out if scores is None else scores,
            out,
            grad,
            share,
            dx,
            rows,
            keys,
            scale,
            softcap,
            CAP=scores is not None,
            SINKS=sinks_dtype is not None,
            ACC=accumulator(out),
            BLOCK=power(keys),
            num_warps=warps(power(keys)),
        )
        d_sinks = None
        if sinks_dtype is not None:
            d_sinks = rows.view(batch, heads, queries).sum((0, 2)).to(sinks_dtype)
        return dx, None, None, None, d_sinks


def _forward(
    x_ptr: Any,
    mask_ptr: Any,
    sinks_ptr: Any,
    out_ptr: Any,
    share_ptr: Any,
    heads: Any,
    queries: Any,
    keys: Any,
    mask_batch: Any,
    mask_head: Any,
    mask_query: Any,
    mask_key: Any,
    scale: Any,
    softcap: Any,
    MASK: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program; a row that may look nowhere is 0."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < keys
    query = row % queries
    head = (row // queries) % heads
    x = tl.load(x_ptr + row * keys + col, mask=inside, other=0.0).to(ACC) * scale
    if CAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    visible = inside
    if MASK:
        batch = row // queries // heads
        mask_row = mask_ptr + batch * mask_batch + head * mask_head + query * mask_query
        visible = inside & (tl.load(mask_row + col * mask_key, mask=inside, other=0) != 0)
    x = tl.where(visible, x, float("-inf"))
    top = tl.max(x, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(ACC)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    powers = tl.exp(x - top)
    total = tl.sum(powers, 0)
    if SINKS:
        sink_weight = tl.exp(sink - top)
        total += sink_weight
        tl.store(share_ptr + row, sink_weight / total)
    out = powers / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * keys + col, out.to(out_ptr.dtype.element_ty), mask=inside)


def _backward(
    x_ptr: Any,
    out_ptr: Any,
    grad_ptr: Any,
    share_ptr: Any,
    dx_ptr: Any,
    rows_ptr: Any,
    keys: Any,
    scale: Any,
    softcap: Any,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """With p the output: dx = p (grad - sum(grad p)), times the slope of scale and cap."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < keys
    offsets = row * keys + col
    out = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(ACC)
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(ACC)
    dot = tl.sum(out * grad, 0)
    dx = out * (grad - dot) * scale
    if SINKS:
        tl.store(rows_ptr + row, -dot * tl.load(share_ptr + row))
    if CAP:
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC) * scale
        bent = 2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0
        dx = dx * (1.0 - bent * bent)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
