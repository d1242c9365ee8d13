"""Softmax of attention scores that exist: with a mask, a soft cap and sinks."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(
    scores_BNSQSK: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Softmax over the last dim of `scale * scores`; `mask` is True where a query may look.

    A row that may look nowhere is 0.
    """
    x = scores_BNSQSK.float() * scale
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    if mask is not None:
        x = x.masked_fill(~mask, float("-inf"))
    top = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    if sinks_N is not None:
        sinks = sinks_N.float().view(1, -1, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.detach()
    powers = torch.exp(x - top)
    total = powers.sum(-1, keepdim=True)
    if sinks_N is not None:
        total = total + torch.exp(sinks - top)
    return (powers / total.clamp(min=torch.finfo(x.dtype).tiny)).to(scores_BNSQSK.dtype)
