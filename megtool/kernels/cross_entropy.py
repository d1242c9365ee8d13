"""Cross entropy of a linear head, never holding logits of all tokens and the whole vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Reference."""
    z = F.linear(x_TH, weight_VH[:vocab_size], None if bias is None else bias[:vocab_size])
    z = z.float() * scale  # the whole block at once
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, labels_T, ignore_index=ignore_index, reduction="none")
