"""The end of a residual branch: bias, dropout, scale and addition to the residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    training: bool,
    scale: float = 1.0,
) -> Tensor:
    """`residual + scale * dropout(x + bias)`."""
    if bias is not None:
        x = x + bias
    if training and p:
        x = F.dropout(x, p, True)
    return torch.add(residual, x, alpha=scale)
