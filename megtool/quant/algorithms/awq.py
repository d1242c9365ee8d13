"""AWQ: factors for input columns, searched so that rounding loses least of the output.

Ji Lin and others, "AWQ: Activation-aware Weight Quantization" (2024): the weight's columns are
multiplied by `inputs ** alpha / weight ** (1 - alpha)` and their inputs divided by it. Columns
whose inputs are large are rounded more finely so, those that share a scale with them more coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid

LEAST, MOST = 1e-4, 1e4
_TINY = torch.finfo(torch.float32).tiny


def weight_share(weights_OI: Sequence[Tensor], per: int) -> Tensor:
    """How large each column is beside the largest weight under the same scale, a mean over rows."""
    total = torch.zeros(weights_OI[0].shape[1])
    for w in weights_OI:
        size = w.abs().reshape(-1, per or w.shape[1])
        share = size / (size.amax(dim=1, keepdim=True) + _TINY)
        total += share.reshape(w.shape).sum(dim=0)
    return total / sum(len(w) for w in weights_OI)


def factors(inputs_I: Tensor, share_I: Tensor, alpha: float, beta: float | None = None) -> Tensor:
    """`inputs ** alpha / share ** beta` (`1 - alpha`), so that largest times smallest is 1.

    Source: modelopt 0.47 `model_calib.py` awq_lite's get_scale, its limits too.
    """
    beta = 1 - alpha if beta is None else beta
    out = (inputs_I.pow(alpha) / (share_I.pow(beta) + _TINY)).clamp(LEAST, MOST)
    return out / (out.max() * out.min()).sqrt()


def candidates(
    inputs: Sequence[Tensor], share_I: Tensor, step: float, *, exact: bool = False
) -> Iterator[Tensor]:
    """What is tried: alphas from 0 to 1 with each measure of the inputs, with and without the
    weight's share; `exact`: the first measure alone, with it, as ModelOpt does."""
    steps = round(1 / step)
    alphas = [i / steps for i in range(steps + 1)]
    if exact:
        yield from (factors(inputs[0], share_I, a) for a in alphas)
        return
    yield torch.ones_like(share_I)
    for size_I in inputs:
        for a in alphas:
            yield factors(size_I, share_I, a)
            if a:
                yield factors(size_I, share_I, a, 0.0)


def weight_error(left_OI: Tensor, gram_II: Tensor) -> float:
    """The squared error of the outputs: tr(D H D^T)."""
    return float(((left_OI @ gram_II) * left_OI).sum(dtype=torch.float64))


def searched(
    weights_OI: Sequence[Tensor], gram_II: Tensor, grid: Grid, tried: Iterator[Tensor]
) -> Tensor:
    """Of the factors that are tried, those under which rounded weights lose least."""
    best, min_loss = torch.ones(len(gram_II)), float("inf")
    for scale in tried:
        loss = 0.0
        for w in weights_OI:
            error = grid.rounded(w * scale) / scale - w
            loss += weight_error(error, gram_II)
        if loss < min_loss:
            best, min_loss = scale, loss
    return best
