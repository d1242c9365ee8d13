"""Search for the clipping threshold of weight scales.

Large weights are rare, and clipping them gives all others a finer resolution. `search_by_output`
weighs errors by the Gram matrix of the inputs (as AWQ's clip search does with a few sampled rows:
Ji Lin and others, "AWQ: Activation-aware Weight Quantization", 2024); `search_by_weight` weighs
all errors equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid

CLIP_RATIOS = tuple(round(1.0 - 0.025 * i, 3) for i in range(21))
"""Candidate thresholds as fractions of the amax, 1 first."""

FOUR_OVER_SIX = (1.0, 1.5)
"""The largest element of a block becomes FP4's 6, or its 4: codes have no number between the two,
so a block whose second largest elements lie there is better off under a larger scale.

Jack Cook and others, "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"
(2025).
"""

SCALE_RATIOS = (1.0, *(1 + i / 16 for i in range(-8, 13) if i))
"""From half the scale of the amax to 1.75 times that, no further apart than FP8 numbers are."""

POWER_RATIOS, ALL_POWER_RATIOS = (1.0, 0.5), (1.0, 0.5, 2.0)
"""The same for scales that are powers of two: without larger ones, and with."""


def propose_ratios(
    grid: Grid, *, four_over_six: bool = False, scale_search: bool = False
) -> Sequence[float]:
    """The candidates for a grid: thresholds that clip, and what the options add for FP4."""
    if grid.kind.startswith("mx"):
        return ALL_POWER_RATIOS if scale_search and grid.kind == "mxfp4" else POWER_RATIOS
    if grid.kind == "nvfp4" and (four_over_six or scale_search):
        return SCALE_RATIOS if scale_search else FOUR_OVER_SIX
    return CLIP_RATIOS


def search_by_output(
    weight_OI: Tensor,
    gram_II: Tensor,
    grid: Grid,
    global_amax: float | None = None,
    ratios: Sequence[float] = CLIP_RATIOS,
) -> Tensor:
    """Find the `amax` of each scale with the least output error.

    Errors of different groups are treated as independent; with one scale per row this is exact.
    """
    out, width = weight_OI.shape
    group_size = grid.columns or width
    blocks = gram_II.reshape(
        width // group_size, group_size, width // group_size, group_size
    ).diagonal(dim1=0, dim2=2)
    blocks_GPP = blocks.permute(2, 0, 1).contiguous()

    def errors(left_OI: Tensor) -> Tensor:
        left_GOP = left_OI.reshape(out, -1, group_size).transpose(0, 1)
        return (torch.bmm(left_GOP, blocks_GPP) * left_GOP).sum(dim=2).T

    return _search(weight_OI, grid, global_amax, ratios, errors)


def search_by_weight(
    weight_OI: Tensor,
    grid: Grid,
    global_amax: float | None = None,
    ratios: Sequence[float] = CLIP_RATIOS,
    weights_I: Tensor | None = None,
) -> Tensor:
    """Find the `amax` with the least squared error of the weight, weighted by `weights_I`."""
    out, width = weight_OI.shape
    group_size = grid.columns or width

    def errors(left_OI: Tensor) -> Tensor:
        size = left_OI.square()
        if weights_I is not None:
            size *= weights_I
        return size.reshape(out, -1, group_size).sum(dim=2)

    return _search(weight_OI, grid, global_amax, ratios, errors)


def _search(
    weight_OI: Tensor,
    grid: Grid,
    global_amax: float | None,
    ratios: Sequence[float],
    errors: Callable[[Tensor], Tensor],
) -> Tensor:
    """Find the best `amax` by `errors`, which gives the errors of groups `[out, groups]`."""
    full_amax = grid.amax(weight_OI)
    best = full_amax
    min_loss: Tensor | None = None
    for ratio in ratios:
        candidate = full_amax * ratio
        error = grid.fake_quantize(weight_OI, candidate, global_amax) - weight_OI
        loss = _sum_per_scale(errors(error), grid, full_amax)
        if min_loss is None:
            best, min_loss = candidate, loss
            continue
        better = loss < min_loss
        best = torch.where(better, candidate, best)
        min_loss = torch.where(better, loss, min_loss)
    return best


def _sum_per_scale(errors_OG: Tensor, grid: Grid, like: Tensor) -> Tensor:
    """Sum the errors of groups to errors of scales."""
    if like.dim() == 0:
        return errors_OG.sum()
    if like.dim() == 1:
        return errors_OG.sum(dim=1)
    if grid.rows > 1:
        return errors_OG.reshape(-1, grid.rows, errors_OG.shape[1]).sum(dim=1)
    return errors_OG
