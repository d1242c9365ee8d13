"""AWQ's search for the per-channel smoothing scale with the least output error.

Ji Lin and others, "AWQ: Activation-aware Weight Quantization" (2024): the weight's columns are
multiplied by `inputs ** alpha / weight ** (1 - alpha)` and their inputs divided by it. Channels
with large inputs then get a finer resolution, at the cost of others that share their scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid

MIN_SCALE, MAX_SCALE = 1e-4, 1e4
_TINY = torch.finfo(torch.float32).tiny


def measure_weight_share(weights_OI: Sequence[Tensor], group_size: int) -> Tensor:
    """Measure each column relative to the largest weight in its group, averaged over rows."""
    total = torch.zeros(weights_OI[0].shape[1])
    for w in weights_OI:
        size = w.abs().reshape(-1, group_size or w.shape[1])
        share = size / (size.amax(dim=1, keepdim=True) + _TINY)
        total += share.reshape(w.shape).sum(dim=0)
    return total / sum(len(w) for w in weights_OI)


def compute_scale(
    inputs_I: Tensor, share_I: Tensor, alpha: float, beta: float | None = None
) -> Tensor:
    """`inputs ** alpha / share ** beta` (default `1 - alpha`), with max * min normalized to 1.

    Source: modelopt 0.47 `model_calib.py` awq_lite's get_scale, including its limits.
    """
    beta = 1 - alpha if beta is None else beta
    out = (inputs_I.pow(alpha) / (share_I.pow(beta) + _TINY)).clamp(MIN_SCALE, MAX_SCALE)
    return out / (out.max() * out.min()).sqrt()


def propose_scales(
    inputs: Sequence[Tensor], share_I: Tensor, step: float, *, matches_modelopt: bool = False
) -> Iterator[Tensor]:
    """Yield candidate scales: alphas from 0 to 1 with each input measure, with and without the
    weight's share; `matches_modelopt`: only the first measure with the weight's share."""
    steps = round(1 / step)
    alphas = [i / steps for i in range(steps + 1)]
    if matches_modelopt:
        yield from (compute_scale(inputs[0], share_I, a) for a in alphas)
        return
    yield torch.ones_like(share_I)
    for size_I in inputs:
        for a in alphas:
            yield compute_scale(size_I, share_I, a)
            if a:
                yield compute_scale(size_I, share_I, a, 0.0)


def measure_output_error(error_OI: Tensor, gram_II: Tensor) -> float:
    """The squared output error: tr(D H D^T)."""
    return float(((error_OI @ gram_II) * error_OI).sum(dtype=torch.float64))


def search_scale(
    weights_OI: Sequence[Tensor], gram_II: Tensor, grid: Grid, scales: Iterator[Tensor]
) -> Tensor:
    """Find the candidate scale with the least output error."""
    best, min_loss = torch.ones(len(gram_II)), float("inf")
    for scale in scales:
        loss = 0.0
        for w in weights_OI:
            error = grid.fake_quantize(w * scale) / scale - w
            loss += measure_output_error(error, gram_II)
        if loss < min_loss:
            best, min_loss = scale, loss
    return best
