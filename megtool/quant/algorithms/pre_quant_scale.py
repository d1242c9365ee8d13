"""Stored columns: factors as they are once what divides inputs by them has been rounded.

Inputs are divided by a norm whose weights were divided beforehand, or by a stored vector of
inverses. Both have few bits. Factors are therefore moved to those that the rounded numbers stand
for, before weights are multiplied by them: what is written is then the model that was decided on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW_PRECISION_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of fewer bits than factors have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """A norm before a point: its weights float32 `[in]`, the type they are stored in (torch's
    name), and whether a stored w stands for 1 + w."""

    weight: Tensor
    dtype: str
    zero_centered: bool


def round_to_pre_quant_scale(scale: Tensor) -> Tensor:
    """Factors whose inverses are bfloat16 numbers."""
    return 1 / (1 / scale).bfloat16().float()


def round_to_folded_norm(scale: Tensor, norm: NormWeights) -> Tensor:
    """Factors that the weights of `norm`, divided by them and rounded, stand for.

    A factor under which a weight would vanish is given up (1).
    """
    dtype = LOW_PRECISION_DTYPES.get(norm.dtype)
    if dtype is None:
        return scale
    offset = 1.0 if norm.zero_centered else 0.0
    before = norm.weight.float() + offset
    after = (before / scale - offset).to(dtype).float() + offset
    moved = torch.where(after == 0, torch.ones_like(scale), before / after)
    return torch.where(before == 0, scale, moved)
