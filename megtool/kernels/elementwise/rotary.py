"""Rotary position embedding: pairs of elements of each head rotated by an angle per position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.kernels.dispatch import Kernel
from megtool.kernels.elementwise import rotary_triton


def rotate(
    x_BSND: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Turn the first R elements of every head by the angles of its position; the rest passes.

    Element i makes a pair with element i + R/2, or with its neighbor where `interleaved`
    (GPT-J, GLM, DeepSeek); cos and sin hold R values a position, two for each pair, in the order
    of the elements (Hugging Face's form, scaled as YaRN likes it). Their batch may be 1.

    Several dims may stand for N, such as query groups and their heads: a slice of the product
    that holds queries and keys side by side turns in one call, without a copy before.

    Computed in the wider one of x's dtype and theirs (by Triton: in fp32), returned in x's dtype,
    contiguous. cos and sin get no gradient.
    """
    return _ROTATE.on(x_BSND.device)(x_BSND, cos_BSR, sin_BSR, interleaved)


def _rotate(x: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos_BSR.unsqueeze(2), sin_BSR.unsqueeze(2)
    for _ in range(x.dim() - 4):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Rotate.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
        return out
    return _turn(x, cos, sin, interleaved, back=False)


class _Rotate(torch.autograd.Function):
    """It keeps only the angles: the backward pass turns the gradient back."""

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
    """One pass for the cosine and one for each half of the sine, with no copies between."""
    size = cos.shape[-1]
    is_full_width = size == x.shape[-1]
    head = x if is_full_width else x[..., :size]
    out = head * cos
    out_1, out_2 = _pairs(out, interleaved)
    x_1, x_2 = _pairs(head, interleaved)
    sin_1, sin_2 = _pairs(sin, interleaved)
    if back:
        out_1.addcmul_(x_2, sin_2)
        out_2.addcmul_(x_1, sin_1, value=-1)
    else:
        out_1.addcmul_(x_2, sin_1, value=-1)
        out_2.addcmul_(x_1, sin_2)
    out = out.to(x.dtype)
    return out.contiguous() if is_full_width else torch.cat((out, x[..., size:]), -1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second elements of all pairs."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


_ROTATE = Kernel("rotate", _rotate, triton=rotary_triton.rotate)
