"""Triton kernels that permute tokens to expert rows and back, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl

TILE = 2048


def copy_rows(x_TH: Tensor, row_ids_R: Tensor, num: int) -> Tensor:
    """See `experts.permute`: the token of every row."""
    x_TH = x_TH.contiguous()
    num_rows, size = row_ids_R.numel(), x_TH.shape[1]
    out = x_TH.new_empty(num_rows, size)
    block = min(TILE, power(size))
    tiles = cdiv(size, block)
    sizes = {"BLOCK": block, "num_warps": warps(block)}
    launch(_copy, num_rows * tiles, x_TH.device, x_TH, row_ids_R, out, size, tiles, num, **sizes)
    return out


def sum_rows(rows_RH: Tensor, inverse_R: Tensor, num: int, probs_TK: Tensor | None) -> Tensor:
    """See `experts.unpermute`: each token's rows, weighted where probs are given."""
    size = rows_RH.shape[1]
    num_tokens = inverse_R.numel() // num
    out = rows_RH.new_empty(num_tokens, size)
    block = min(TILE, power(size))
    tiles = cdiv(size, block)
    launch(
        _sum,
        num_tokens * tiles,
        rows_RH.device,
        rows_RH,
        inverse_R,
        rows_RH if probs_TK is None else probs_TK.contiguous(),
        out,
        size,
        tiles,
        NUM=num,
        WEIGHTED=probs_TK is not None,
        ACC=accumulator(rows_RH),
        BLOCK=block,
        num_warps=warps(block),
    )
    return out


def spread_rows(
    g_TH: Tensor, rows_RH: Tensor, row_ids_R: Tensor, probs_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """See `experts.unpermute`: the gradients of rows and probs, one pass over both."""
    size = rows_RH.shape[1]
    g_rows_RH, g_probs_TK = torch.empty_like(rows_RH), torch.empty_like(probs_TK).contiguous()
    block = min(TILE, power(size))
    launch(
        _spread,
        row_ids_R.numel(),
        rows_RH.device,
        g_TH,
        rows_RH.contiguous(),
        row_ids_R,
        probs_TK.contiguous(),
        g_rows_RH,
        g_probs_TK,
        size,
        NUM=probs_TK.shape[1],
        ACC=accumulator(rows_RH),
        BLOCK=block,
        num_warps=warps(block),
    )
    return g_rows_RH, g_probs_TK


def _copy(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    num_tiles: tl.tensor,
    num: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One tile of one row."""
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    offsets = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row) // num
    x = tl.load(x_ptr + token * size + offsets, mask=offsets < size, other=0.0)
    tl.store(out_ptr + row * size + offsets, x, mask=offsets < size)


def _sum(
    rows_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    num_tiles: tl.tensor,
    NUM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tile of one token: its rows are anywhere, and are added in the order of its experts."""
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    offsets = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=ACC)
    for choice in range(NUM):
        row = tl.load(inverse_ptr + token * NUM + choice)
        part = tl.load(rows_ptr + row * size + offsets, mask=offsets < size, other=0.0).to(ACC)
        if WEIGHTED:
            part = part * tl.load(probs_ptr + token * NUM + choice).to(ACC)
        total += part
    tl.store(
        out_ptr + token * size + offsets, total.to(out_ptr.dtype.element_ty), mask=offsets < size
    )


def _spread(
    g_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    probs_ptr: tl.tensor,
    g_rows_ptr: tl.tensor,
    g_probs_ptr: tl.tensor,
    size: tl.tensor,
    NUM: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its gradient, and the product of both that is its probability's gradient."""
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(ids_ptr + row)
    token = assignment // NUM
    prob = tl.load(probs_ptr + assignment).to(ACC)
    dot = tl.zeros([BLOCK], dtype=ACC)
    for first in range(0, size, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < size
        g = tl.load(g_ptr + token * size + offsets, mask=inside, other=0.0).to(ACC)
        dot += g * tl.load(rows_ptr + row * size + offsets, mask=inside, other=0.0).to(ACC)
        spread = (g * prob).to(g_rows_ptr.dtype.element_ty)
        tl.store(g_rows_ptr + row * size + offsets, spread, mask=inside)
    total = tl.sum(dot, 0).to(g_probs_ptr.dtype.element_ty)
    tl.store(g_probs_ptr + assignment, total)
