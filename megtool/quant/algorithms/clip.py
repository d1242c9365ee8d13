"""Clip: how far below the largest magnitude a scale is best set, found by trying.

Large weights are rare, and a scale that is a little too small for them is finer for all others.
`by_output` weighs errors by the Gram matrix of the inputs under each scale (as AWQ's clip search
does with a few rows of them: Ji Lin and others, "AWQ: Activation-aware Weight Quantization", 2024);
`by_weight` weighs them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid

SHRINKS = tuple(round(1.0 - 0.025 * i, 3) for i in range(21))
"""Shares of the largest magnitude that are tried, the whole of it first."""


def by_output(
    weight_OI: Tensor,
    gram_II: Tensor,
    grid: Grid,
    second_amax: float | None = None,
    shrinks: Sequence[float] = SHRINKS,
) -> Tensor:
    """The `amax` under which each scale's share of the output is nearest to what it was.

    Errors of different groups are taken as independent; of a row with one scale nothing is left
    out.
    """
    out, width = weight_OI.shape
    per = grid.columns or width
    blocks = gram_II.reshape(width // per, per, width // per, per).diagonal(dim1=0, dim2=2)
    blocks_GPP = blocks.permute(2, 0, 1).contiguous()

    def errors(left_OI: Tensor) -> Tensor:
        left_GOP = left_OI.reshape(out, -1, per).transpose(0, 1)
        return (torch.bmm(left_GOP, blocks_GPP) * left_GOP).sum(dim=2).T

    return _least(weight_OI, grid, second_amax, shrinks, errors)


def by_weight(
    weight_OI: Tensor,
    grid: Grid,
    second_amax: float | None = None,
    shrinks: Sequence[float] = SHRINKS,
    weights_I: Tensor | None = None,
) -> Tensor:
    """The `amax` of least squared error of the weight itself, columns weighed by `weights_I`."""
    out, width = weight_OI.shape
    per = grid.columns or width

    def errors(left_OI: Tensor) -> Tensor:
        size = left_OI.square()
        if weights_I is not None:
            size *= weights_I
        return size.reshape(out, -1, per).sum(dim=2)

    return _least(weight_OI, grid, second_amax, shrinks, errors)


def _least(
    weight_OI: Tensor,
    grid: Grid,
    second_amax: float | None,
    shrinks: Sequence[float],
    errors: Callable[[Tensor], Tensor],
) -> Tensor:
    """The best `amax` by `errors`, of each row's groups, `[out, groups]`."""
    top = grid.amax(weight_OI)
    best = top
    least: Tensor | None = None
    for shrink in shrinks:
        tried = top * shrink
        left = grid.rounded(weight_OI, tried, second_amax) - weight_OI
        found = _by_scale(errors(left), grid, top)
        if least is None:
            best, least = tried, found
            continue
        better = found < least
        best = torch.where(better, tried, best)
        least = torch.where(better, found, least)
    return best


def _by_scale(errors_OG: Tensor, grid: Grid, like: Tensor) -> Tensor:
    """Errors of each row's groups added up to those of each scale."""
    if like.dim() == 0:
        return errors_OG.sum()
    if like.dim() == 1:
        return errors_OG.sum(dim=1)
    if grid.rows > 1:
        return errors_OG.reshape(-1, grid.rows, errors_OG.shape[1]).sum(dim=1)
    return errors_OG
