"""Rounding of smoothing scales to what a checkpoint can store.

Inputs are divided by the smoothing scale through the weights of the preceding norm, or through a
stored `pre_quant_scale`. Both have low precision. Smoothing scales are rounded accordingly before
weights are multiplied by them, so that both sides of the product match exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW_PRECISION_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes with less precision than smoothing scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """The norm before an activation site: weights float32 `[in]`, their stored dtype (torch's
    name), and whether a stored w means 1 + w."""

    weight: Tensor
    dtype: str
    zero_centered: bool


def round_to_pre_quant_scale(scale: Tensor) -> Tensor:
    """Round a smoothing scale so that its inverse is a bfloat16 number."""
    return 1 / (1 / scale).bfloat16().float()


def round_to_folded_norm(scale: Tensor, norm: NormWeights) -> Tensor:
    """Round a smoothing scale to what the weights of `norm`, divided by it, can represent.

    Where the divided weight would underflow to zero, the scale becomes 1.
    """
    dtype = LOW_PRECISION_DTYPES.get(norm.dtype)
    if dtype is None:
        return scale
    offset = 1.0 if norm.zero_centered else 0.0
    before = norm.weight.float() + offset
    after = (before / scale - offset).to(dtype).float() + offset
    moved = torch.where(after == 0, torch.ones_like(scale), before / after)
    return torch.where(before == 0, scale, moved)
