"""RMSNorm and LayerNorm, also fused with the addition of the residual before them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim."""
    if weight is None or (not zero_centered and weight.dtype == x.dtype):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    scale = weight.float() + 1 if zero_centered else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dim."""
    if not zero_centered and weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    scale = weight.float() + 1 if zero_centered else weight.float()
    shift = None if bias is None else bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], scale, shift, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered), total


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum."""
    total = x + residual
    return layer_norm(total, weight, bias, eps, zero_centered=zero_centered), total
