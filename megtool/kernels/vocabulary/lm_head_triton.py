"""Triton kernels over a block of logits: each row's online softmax, and the loss gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl

TILE = 4096


def fold(
    raw_TB: Tensor,
    start: int,
    column_T: Tensor,
    softcap: float,
    scale: float,
    maximum_T: Tensor,
    total_T: Tensor,
    target_T: Tensor,
    best_T: Tensor | None,
) -> None:
    """See `head.fold`; one program a row, one pass over the logits."""
    num_rows, width = raw_TB.shape
    if not width:
        return
    raw_TB = raw_TB if raw_TB.stride(1) == 1 else raw_TB.contiguous()
    block = min(TILE, power(width))
    launch(
        _fold,
        num_rows,
        raw_TB.device,
        raw_TB,
        column_T,
        maximum_T,
        total_T,
        target_T,
        column_T if best_T is None else best_T,
        raw_TB.stride(0),
        width,
        start,
        softcap,
        scale,
        CAP=softcap != 0,
        BEST=best_T is not None,
        ACC=accumulator(raw_TB),
        BLOCK=block,
        num_warps=warps(block),
    )


def slope(
    raw_TB: Tensor,
    start: int,
    column_T: Tensor,
    log_total_T: Tensor,
    g_T: Tensor,
    softcap: float,
    scale: float,
    out_TB: Tensor,
) -> None:
    """See `head.slope`; every element on its own, also in place."""
    num_rows, width = raw_TB.shape
    if not width:
        return
    in_place = raw_TB.stride(1) == 1 and out_TB.stride(1) == 1
    target = out_TB if in_place else out_TB.contiguous()
    raw_TB = raw_TB if in_place else raw_TB.contiguous()
    block = min(TILE, power(width))
    tiles = cdiv(width, block)
    launch(
        _slope,
        num_rows * tiles,
        raw_TB.device,
        raw_TB,
        column_T,
        log_total_T,
        g_T,
        target,
        raw_TB.stride(0),
        target.stride(0),
        width,
        tiles,
        start,
        softcap,
        scale,
        CAP=softcap != 0,
        ACC=accumulator(raw_TB),
        BLOCK=block,
        num_warps=warps(block),
    )
    if target is not out_TB:
        out_TB.copy_(target)


def _bend(x: tl.tensor, softcap: tl.tensor, scale: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Scaled and capped logits; tanh by the exponential, which never overflows this way round."""
    x = x * scale
    if CAP:
        decay = tl.exp(-2.0 * tl.abs(x) / softcap)
        bent = softcap * (1.0 - decay) / (1.0 + decay)
        x = tl.where(x < 0, -bent, bent)
    return x


def _fold(
    raw_ptr: tl.tensor,
    column_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    total_ptr: tl.tensor,
    target_ptr: tl.tensor,
    best_ptr: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    start: tl.tensor,
    softcap: tl.tensor,
    scale: tl.tensor,
    CAP: tl.constexpr,
    BEST: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: update its maximum, sum of exponentials, label's logit and argmax."""
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.load(maximum_ptr + row)
    total = tl.load(total_ptr + row)
    target = tl.load(target_ptr + row)
    column = tl.load(column_ptr + row) - start
    if BEST:
        best = tl.load(best_ptr + row)
    for first in range(0, width, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < width
        raw = tl.load(raw_ptr + row * stride + offsets, mask=inside, other=0.0).to(ACC)
        x = tl.where(inside, _bend(raw, softcap, scale, CAP), float("-inf"))
        highest = tl.max(x, 0)
        if BEST:
            # The first of equal logits: the lowest column among them.
            argmax = tl.min(tl.where(x == highest, offsets, width), 0) + start
            best = tl.where(highest > maximum, argmax.to(tl.int64), best)
        above = tl.maximum(maximum, highest)
        total = total * tl.exp(maximum - above) + tl.sum(tl.exp(x - above), 0)
        target += tl.sum(tl.where(inside & (offsets == column), x, 0.0), 0)
        maximum = above
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    tl.store(target_ptr + row, target)
    if BEST:
        tl.store(best_ptr + row, best)


def _slope(
    raw_ptr: tl.tensor,
    column_ptr: tl.tensor,
    log_total_ptr: tl.tensor,
    g_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    num_tiles: tl.tensor,
    start: tl.tensor,
    softcap: tl.tensor,
    scale: tl.tensor,
    CAP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tile of a row: (probability - [this is the label]) * g * d(bent)/d(raw)."""
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64)
    offsets = (program % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    raw = tl.load(raw_ptr + row * stride + offsets, mask=inside, other=0.0).to(ACC)
    x = _bend(raw, softcap, scale, CAP)
    slope = tl.exp(x - tl.load(log_total_ptr + row))
    column = tl.load(column_ptr + row) - start
    slope = tl.where(offsets == column, slope - 1.0, slope)
    slope = slope * tl.load(g_ptr + row) * scale
    if CAP:
        slope = slope * (1.0 - (x / softcap) * (x / softcap))
    tl.store(out_ptr + row * out_stride + offsets, slope.to(out_ptr.dtype.element_ty), mask=inside)
