"""Slopes of attention scores by distance (ALiBi): what positions are in BLOOM and MPT.

Source: Press et al., 2021, "Train Short, Test Long"; the order of heads whose number is no power
of two is that of the paper's code, which transformers' `models/mpt` and `models/bloom` have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megtool.parallel.process_groups import Group
from megtool.spec.model_config import ModelConfig


def slopes_of(config: ModelConfig, tp: Group, device: torch.device | str) -> Tensor | None:
    """The slope of each head of this rank, float32 [N]; None where scores have none."""
    if config.positions.position_embedding != "alibi":
        return None
    slopes_N = slopes(config.attention.num_heads, config.positions.alibi_bias_max, device)
    heads = config.attention.num_heads // tp.size
    return slopes_N[tp.rank * heads : (tp.rank + 1) * heads]


def slopes(num_heads: int, bias_max: float, device: torch.device | str = "cpu") -> Tensor:
    """The slopes of all heads: 2^(-bias_max k / n) for k from 1 to n, where n is a power of two.

    For other numbers of heads n is the next power of two, and every second slope comes first.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device) * (bias_max / power)
    slopes_N = torch.exp2(-exponents)
    if power == num_heads:
        return slopes_N
    return torch.cat((slopes_N[1::2], slopes_N[::2]))[:num_heads]
