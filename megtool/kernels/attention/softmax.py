"""Softmax of materialized attention scores: with a mask, a soft cap and sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.kernels.attention import softmax_triton
from megtool.kernels.dispatch import Chosen, Kernel
from megtool.kernels.launch import LONGEST_ROW


def masked_softmax(
    scores_BNSQSK: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Softmax over the last dim (keys) of `scale * scores`, computed in fp32, in scores' dtype.

    A `softcap` c other than 0 bends the scaled scores x to `c * tanh(x / c)` before the mask.
    `mask` is bool, True where a query may look, of a shape that broadcasts to [B, N, SQ, SK].
    `sinks_N` has a score for each head, neither scaled nor bent, of one more key whose share is
    dropped (gpt-oss). A query that may look nowhere gets zeros, and passes no gradient on.

    What scaled_dot_product_attention does without soft caps and sinks belongs there: here the
    scores take memory.
    """
    cannot: tuple[Chosen, ...] = ("triton",) if scores_BNSQSK.shape[-1] > LONGEST_ROW else ()
    run = _MASKED_SOFTMAX.on(scores_BNSQSK.device, without=cannot)
    return run(scores_BNSQSK, mask, scale, softcap, sinks_N)


def _masked_softmax(
    scores_BNSQSK: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks_N: Tensor | None,
) -> Tensor:
    kind = torch.promote_types(scores_BNSQSK.dtype, torch.float32)
    x = scores_BNSQSK.to(kind)
    if softcap:
        x = torch.tanh(x * (scale / softcap)) * softcap
    elif scale != 1:
        x = x * scale
    if mask is not None:
        x = x.masked_fill(~mask, torch.finfo(kind).min)
    if sinks_N is not None:
        sinks = sinks_N.to(kind).view(1, -1, 1, 1).expand(*x.shape[:3], 1)
        x = torch.cat((x, sinks), -1).softmax(-1)[..., :-1]
    elif x.shape[-1]:
        x = x.softmax(-1)
        if mask is not None:
            x = x * mask.any(-1, keepdim=True)
    return x.to(scores_BNSQSK.dtype)


_MASKED_SOFTMAX = Kernel("masked_softmax", _masked_softmax, triton=softmax_triton.masked_softmax)
