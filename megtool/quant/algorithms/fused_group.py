"""Quantization parameters of the weights that share one input, solved together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megtool.quant.algorithms import (
    awq,
    clip,
    gptq,
    input_compensation,
    mxfp4_cast,
    smoothquant,
    svdquant,
)
from megtool.quant.algorithms.algorithm_config import AlgorithmConfig
from megtool.quant.algorithms.pre_quant_scale import (
    NormWeights,
    round_to_folded_norm,
    round_to_pre_quant_scale,
)
from megtool.quant.algorithms.weight_grid import (
    Grid,
    fake_quantize_inputs,
    make_grid,
    max_input_code,
)
from megtool.quant.qparams import LowRankBranch
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat
from megtool.quant.statistics.observers import observe_amax
from megtool.quant.statistics.site_statistics import ActivationStatistics

_ROOM_ABOVE = 448 / 256
"""By how much more than the amax of an entire tensor its global scale allows, so that the block
with that amax may have a larger scale too (ModelOpt's `E4M3_MAX_46`)."""

CHUNK_ELEMENTS = 1 << 22
"""Elements processed at a time if the rows of a weight are independent."""


@dataclass(slots=True, kw_only=True)
class FusedGroupResult:
    """The result for a group; `amaxes`, `codes` and `branches` are by module. Empty or zero means
    the default."""

    smoothing_scale: NDArray[np.float32] | None = None
    input_amax: float = 0.0
    global_amax: float = 0.0
    amaxes: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    codes: dict[str, NDArray[np.int8]] = field(default_factory=dict)
    branches: dict[str, LowRankBranch] = field(default_factory=dict)


def solve_fused_group(
    weights: Mapping[str, Tensor],
    format: RecipeFormat,
    config: AlgorithmConfig,
    statistics: ActivationStatistics | None,
    *,
    norm: NormWeights | None = None,
    stores_pre_quant_scale: bool = False,
) -> FusedGroupResult:
    """Solve the parameters of `weights` (float32 `[out, in]`, by module) in `format`.

    `statistics` are those of their common input (None: unknown). The smoothing scale is rounded to
    what can be stored: a `pre_quant_scale` vector with `stores_pre_quant_scale`, else the weights
    of `norm` (None: not rounded).
    """
    grid = make_grid(format)
    measured = statistics if statistics is not None and statistics.num_tokens else None
    scale, input_amax = None, 0.0
    if measured is not None:
        to_stored = partial(
            _round_to_stored, norm=norm, stores_pre_quant_scale=stores_pre_quant_scale
        )
        scale, input_amax = _solve_smoothing(weights, format, grid, config, measured, to_stored)
    out = FusedGroupResult(input_amax=input_amax)
    if config.rank and format.number.has_branch:
        _solve_branches(out, weights, scale, grid, config.rank)
        return out
    if scale is not None:
        out.smoothing_scale = scale.numpy()
    if grid.has_global_scale:
        amaxes = [float((w if scale is None else w * scale).abs().max()) for w in weights.values()]
        out.global_amax = (
            max(amaxes, default=0.0) if len(amaxes) > 1 or measured is not None else 0.0
        )
        if grid.kind == "nvfp4" and (config.four_over_six or config.scale_search):
            out.global_amax = max(amaxes, default=0.0) * _ROOM_ABOVE
    if config.cast and grid.kind == "nvfp4":
        out.global_amax, amaxes_of = mxfp4_cast.solve_cast(weights, grid)
        out.amaxes = {n: amax.numpy() for n, amax in amaxes_of.items()}
        return out
    gram_II = _gram(measured, scale, config)
    targets = {n: w if scale is None else w * scale for n, w in weights.items()}
    if gram_II is not None and measured is not None and config.compensates_inputs(format):
        targets, gram_II = _compensate(
            targets, gram_II, measured, scale, format, out.input_amax, config
        )
        if out.global_amax:
            room = out.global_amax / max(amaxes)
            out.global_amax = max(float(w.abs().max()) for w in targets.values()) * room
    for name, target_OI in targets.items():
        amax, codes = _solve_weight(target_OI, gram_II, grid, config, out.global_amax)
        if amax is not None:
            out.amaxes[name] = amax.numpy()
        if codes is not None:
            out.codes[name] = codes.numpy()
    return out


def _solve_smoothing(
    weights: Mapping[str, Tensor],
    format: RecipeFormat,
    grid: Grid,
    config: AlgorithmConfig,
    statistics: ActivationStatistics,
    to_stored: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, float]:
    """Solve the smoothing scale (as stored) and the amax of the smoothed inputs."""
    weights_OI = list(weights.values())
    amax_I = torch.from_numpy(statistics.amax)
    scale = None
    smooths = config.smooths(format)
    trial = None
    if weights and statistics.sample is not None and format.algo in INPUT_PACKINGS:
        trial = smoothquant.OutputErrorTrial(
            torch.from_numpy(statistics.sample), amax_I, weights_OI
        )
    clips = smoothquant.CLIP_RATIOS if config.clips_inputs and max_input_code(format) else (1.0,)
    rms_I = _root_mean_square(statistics)
    sizes = smoothquant.measure_inputs(amax_I, rms_I, robust=config.robust)
    if smooths and config.smoothing == "smoothquant" and config.alpha is not None:
        scale = smoothquant.compute_scale(sizes[0], weights_OI, config.alpha)
    elif smooths:
        if config.smoothing == "smoothquant":
            scales = smoothquant.propose_scales(sizes, weights_OI, config.alpha_step)
        else:
            measures = [torch.from_numpy(statistics.abs_mean), rms_I]
            share_I = awq.measure_weight_share(weights_OI, grid.columns)
            scales = awq.propose_scales(
                measures, share_I, config.alpha_step, matches_modelopt=config.matches_modelopt
            )
        if trial is not None:
            scale, _ = smoothquant.search_scale(trial, format, grid, scales, clips)
        elif statistics.gram is not None:
            gram_II = torch.from_numpy(statistics.gram) / statistics.num_tokens
            scale = awq.search_scale(weights_OI, gram_II, grid, scales)
    if scale is not None:
        scale = to_stored(scale)
    if not max_input_code(format):
        return scale, 0.0
    if trial is not None and len(clips) > 1:
        ones = torch.ones_like(amax_I) if scale is None else scale
        return scale, trial.input_amax(ones, format, clips)
    return scale, observe_amax(
        statistics,
        config.input_observer,
        percentile=config.percentile,
        largest=max_input_code(format),
        kind=INPUT_PACKINGS[format.algo],
        smoothing_scale=None if scale is None else scale.numpy(),
    )


def _solve_branches(
    out: FusedGroupResult,
    weights: Mapping[str, Tensor],
    scale: Tensor | None,
    grid: Grid,
    rank: int,
) -> None:
    """Solve SVDQuant's matrices, and scales and codes of the residuals; without data, smoothing
    scales are ones."""
    scale = torch.ones(next(iter(weights.values())).shape[1]) if scale is None else scale
    out.smoothing_scale = scale.numpy()
    smoothed = {n: w * scale for n, w in weights.items()}
    out.branches, residuals = svdquant.split_low_rank(smoothed, rank)
    out.global_amax = max(float(r.abs().max()) for r in residuals.values())
    for name, residual_OI in residuals.items():
        amax, codes = grid.encode(residual_OI, out.global_amax)
        out.amaxes[name], out.codes[name] = amax.numpy(), codes.numpy()


def _round_to_stored(
    scale: Tensor, *, norm: NormWeights | None, stores_pre_quant_scale: bool
) -> Tensor:
    if stores_pre_quant_scale:
        return round_to_pre_quant_scale(scale)
    return scale if norm is None else round_to_folded_norm(scale, norm)


def _root_mean_square(statistics: ActivationStatistics) -> Tensor:
    return torch.from_numpy(
        np.sqrt(statistics.square_sum / statistics.num_tokens).astype(np.float32)
    )


def _gram(
    statistics: ActivationStatistics | None, scale: Tensor | None, config: AlgorithmConfig
) -> Tensor | None:
    """Second moments of the smoothed inputs, if the algorithm uses them."""
    if statistics is None or statistics.gram is None or not (config.clips_weights or config.gptq):
        return None
    gram_II = torch.from_numpy(statistics.gram) / statistics.num_tokens
    if scale is not None:
        gram_II /= scale[:, None]
        gram_II /= scale
    return gptq.damp_gram(gram_II, config.damping, config.shrinkage)


def _compensate(
    weights: Mapping[str, Tensor],
    gram_II: Tensor,
    statistics: ActivationStatistics,
    scale: Tensor | None,
    format: RecipeFormat,
    input_amax: float,
    config: AlgorithmConfig,
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights and second moments that take the rounding of inputs into account."""
    if statistics.sample is None or not len(statistics.sample):
        return dict(weights), gram_II
    sample_TI = torch.from_numpy(statistics.sample)
    inputs_TI = sample_TI if scale is None else sample_TI / scale
    factor_I, noise_I = input_compensation.fit_rounding(
        inputs_TI,
        fake_quantize_inputs(inputs_TI, format, input_amax),
        normalize_tokens=config.normalize_tokens,
    )
    return input_compensation.compensate_inputs(weights, gram_II, factor_I, noise_I)


def _solve_weight(
    weight_OI: Tensor,
    gram_II: Tensor | None,
    grid: Grid,
    config: AlgorithmConfig,
    global_amax: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Solve the amax and codes of one weight; None for the weight's own amax and nearest codes."""
    global_amax_ = global_amax or None
    if grid.has_global_scale and global_amax_ is None:
        global_amax_ = float(weight_OI.abs().max())
    if gram_II is None and not config.mse:
        return None, None
    rows = len(weight_OI)
    if grid.rows == 1:
        rows = max(1, CHUNK_ELEMENTS // weight_OI.shape[1])
    uses_gptq = gram_II is not None and config.gptq and grid.chooses_codes
    ratios = clip.propose_ratios(
        grid, four_over_six=config.four_over_six, scale_search=config.scale_search
    )
    upper, order = None, None
    if gram_II is not None and uses_gptq:
        order = gptq.order_columns(gram_II, desc_act=config.desc_act)
        upper = gptq.compute_inverse_cholesky(gram_II[order][:, order])
    amaxes, codes = [], []
    for begin in range(0, len(weight_OI), rows):
        part = weight_OI[begin : begin + rows]
        amax = grid.amax(part)
        if gram_II is None:
            amax = clip.search_by_weight(part, grid, global_amax_, ratios)
        elif config.clips_weights:
            amax = clip.search_by_output(part, gram_II, grid, global_amax_, ratios)
        if gram_II is not None and upper is not None and order is not None:
            part_codes = gptq.quantize_columns(part, upper, order, grid, amax, global_amax_)
            for _ in range(config.refinements):
                if not grid.is_integer:
                    amax = gptq.refit_block_amax(
                        part, part_codes, gram_II, grid, amax, global_amax_
                    )
                elif not grid.has_global_scale:
                    amax = gptq.refit_amax(part, part_codes, gram_II, grid, amax)
                part_codes = gptq.refine_codes(part, part_codes, gram_II, grid, amax, global_amax_)
            codes.append(grid.stored_codes(part_codes))
        amaxes.append(amax)
    amax = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
    return amax, torch.cat(codes) if codes else None
