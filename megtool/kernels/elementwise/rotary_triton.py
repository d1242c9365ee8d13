"""Triton kernel of rotary embedding: all heads of a token share one load of its angles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl


def rotate(x: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool) -> Tensor:
    """See `rotary.rotate`."""
    out: Tensor = _Rotate.apply(x, cos_BSR, sin_BSR, interleaved)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    """The backward pass is the rotation by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, ctx.interleaved, back=True), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if x.dim() > 5:
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    batch, length, *heads, size = x.shape
    groups, members = (1, *heads)[-2:]
    half, passed = cos.shape[-1] // 2, size - cos.shape[-1]
    block = power(max(half, 1))
    num_rows = max(1, min(power(groups * members), 4096 // block))
    launch(
        _kernel,
        batch * length * cdiv(groups * members, num_rows),
        x.device,
        x,
        cos,
        sin,
        out,
        length,
        groups * members,
        members,
        size,
        half,
        passed,
        x.stride(0),
        x.stride(1),
        x.stride(2) if len(heads) > 1 else 0,
        x.stride(-2),
        *(t.stride(d) if t.shape[d] > 1 else 0 for t in (cos, sin) for d in (0, 1)),
        INTERLEAVED=interleaved,
        BACK=back,
        PASS=passed > 0,
        ROWS=num_rows,
        BLOCK=block,
        BLOCK_PASS=power(max(passed, 1)),
        ACC=accumulator(x),
        num_warps=warps(2 * num_rows * block),
    )
    return out


def _kernel(
    x_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    out_ptr: Any,
    length: Any,
    num_heads: Any,
    members: Any,
    size: Any,
    half: Any,
    passed: Any,
    x_batch: Any,
    x_token: Any,
    x_group: Any,
    x_head: Any,
    cos_batch: Any,
    cos_token: Any,
    sin_batch: Any,
    sin_token: Any,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    PASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """ROWS heads of one token per program; heads are grouped, so that a slice needs no copy."""
    blocks = (num_heads + ROWS - 1) // ROWS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    batch, position = token // length, token % length
    col = tl.arange(0, BLOCK)
    if INTERLEAVED:
        even, odd = 2 * col, 2 * col + 1
    else:
        even, odd = col, half + col
    angle = col < half
    cos_at = cos_ptr + batch * cos_batch + position * cos_token
    sin_at = sin_ptr + batch * sin_batch + position * sin_token
    cos_1 = tl.load(cos_at + even, mask=angle, other=0.0).to(ACC)[None, :]
    cos_2 = tl.load(cos_at + odd, mask=angle, other=0.0).to(ACC)[None, :]
    sin_1 = tl.load(sin_at + even, mask=angle, other=0.0).to(ACC)[None, :]
    sin_2 = tl.load(sin_at + odd, mask=angle, other=0.0).to(ACC)[None, :]
    live = (head < num_heads)[:, None]
    inside = live & angle[None, :]
    from_row = batch * x_batch + position * x_token
    from_row = (from_row + (head // members) * x_group + (head % members) * x_head)[:, None]
    to_row = ((token * num_heads + head) * size)[:, None]
    x_1 = tl.load(x_ptr + from_row + even[None, :], mask=inside, other=0.0).to(ACC)
    x_2 = tl.load(x_ptr + from_row + odd[None, :], mask=inside, other=0.0).to(ACC)
    if BACK:
        out_1 = x_1 * cos_1 + x_2 * sin_2
        out_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        out_1 = x_1 * cos_1 - x_2 * sin_1
        out_2 = x_2 * cos_2 + x_1 * sin_2
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + to_row + even[None, :], out_1.to(kind), mask=inside)
    tl.store(out_ptr + to_row + odd[None, :], out_2.to(kind), mask=inside)
    if PASS:
        pass_through = tl.arange(0, BLOCK_PASS)
        inside = live & (pass_through < passed)[None, :]
        pass_through = 2 * half + pass_through[None, :]
        x = tl.load(x_ptr + from_row + pass_through, mask=inside)
        tl.store(out_ptr + to_row + pass_through, x, mask=inside)
