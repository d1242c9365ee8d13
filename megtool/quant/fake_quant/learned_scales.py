"""Weights rounded with learned scales (LSQ), and the gradients of weights and amaxes.

The rounded weight is `round(w / s_pre) * s_post`, where a block's scale is that of NVFP4 of its
amax. Gradients pass rounding straight through: of a code where the weight is within its range, of
an E4M3 scale where the amax is within that of the whole weight. Sources: Esser et al., 2020 (arXiv
1902.08153); modelopt 0.47, torch/quantization/nn/modules/tensor_quantizer.py
(`StaticBlockScaleQuantizer`) and torch/quantization/tensor_quant.py (`FP4CastSTEFunction`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.quant.fake_quant.rounding_torch import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    block_scale,
    to_e2m1,
)

BLOCK = 16
"""Elements of a row that share a scale."""
_SMALLEST_SHARE = 2.0**-9
_SMALLEST_SCALE = 1e-8


def smallest_learned_amax(global_amax: Any) -> Any:
    """The smallest amax that a block counts with: 1/512 of that of the whole weight, as ModelOpt
    has it (`_block_scale_from_amax`)."""
    return global_amax * _SMALLEST_SHARE


def learned_block_scale(amax: Tensor, global_amax: Tensor, *, rounds: bool) -> Tensor:
    """The scale of blocks of an amax, float32 in its shape.

    Args:
        amax: float32, of each block.
        global_amax: float32, of the whole weight; it broadcasts with `amax`.
        rounds: scales are rounded to E4M3, as they are stored.
    """
    if not rounds:
        return (amax / E2M1_LARGEST).clamp(min=_SMALLEST_SCALE)
    second = global_amax / (E2M1_LARGEST * E4M3_LARGEST)
    second = torch.where(second == 0, 1.0, second)
    return block_scale(torch.maximum(amax, smallest_learned_amax(global_amax)), second) * second


def scale_passes_gradient(amax: Tensor, global_amax: Tensor, *, rounds: bool) -> Tensor:
    """Where the scale follows the amax, as `learned_block_scale` has them."""
    scale = amax / E2M1_LARGEST
    if not rounds:
        return scale > _SMALLEST_SCALE
    largest = global_amax / E2M1_LARGEST
    return (scale > largest * _SMALLEST_SHARE) & (scale <= largest)


def round_with_scales(weight: Tensor, pre: Tensor, post: Tensor) -> Tensor:
    """The weight `[..., in]` rounded under scales `pre` and multiplied by scales `post`, both
    `[..., in / 16]`, in float32."""
    x = _in_blocks(weight) / pre.unsqueeze(-1)
    return to_e2m1(x).mul_(post.unsqueeze(-1)).flatten(-2)


def learned_gradients(
    grad: Tensor, weight: Tensor, pre: Tensor, post: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the weight, of `pre` and of `post` (float32), from that of the weight that
    `round_with_scales` gives."""
    g, x = _in_blocks(grad), _in_blocks(weight)
    x = x / pre.unsqueeze(-1)
    of_post = (g * to_e2m1(x)).sum(-1)
    of_code = torch.where(x.abs() <= E2M1_LARGEST, g * post.unsqueeze(-1), 0.0)
    of_weight = of_code / pre.unsqueeze(-1)
    of_pre = -(of_weight * x).sum(-1)
    return of_weight.flatten(-2), of_pre, of_post


def _in_blocks(x: Tensor) -> Tensor:
    return x.float().reshape(*x.shape[:-1], -1, BLOCK)
