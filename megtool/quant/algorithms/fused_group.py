"""Joint: the weights that multiply one input, decided about together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megtool.quant.algorithms import awq, clip, gptq, smoothquant
from megtool.quant.algorithms.algorithm_config import Method
from megtool.quant.algorithms.pre_quant_scale import Norm, folded, inverses_stored
from megtool.quant.algorithms.weight_grid import Grid, grid_of, input_largest
from megtool.quant.calibration.observers import amax_of
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.qparams import INPUTS
from megtool.quant.recipes.formats import Format

ELEMENTS = 1 << 22
"""Of a weight, those that are worked on at a time where rows do not depend on each other."""


@dataclass(slots=True, kw_only=True)
class Joint:
    """What was decided: by module, where it is of one weight. Empty or zero is nobody's choice."""

    columns: NDArray[np.float32] | None = None
    input_amax: float = 0.0
    second_amax: float = 0.0
    amax: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    codes: dict[str, NDArray[np.int8]] = field(default_factory=dict)


def decide(
    weights: Mapping[str, Tensor],
    format: Format,
    method: Method,
    seen: Statistics | None,
    *,
    norm: Norm | None = None,
    stores_columns: bool = False,
) -> Joint:
    """Decide about `weights` (float32 `[out, in]`, by module), all to be in `format`.

    `seen` is of their input (None: nothing is known). Factors of columns are such as can be stored:
    with `stores_columns` in a vector of inverses, else in `norm` (None: as they were found).
    """
    grid = grid_of(format)
    measured = seen if seen is not None and seen.num_tokens else None
    scale, input_amax = None, 0.0
    if measured is not None:
        to_stored = partial(_round_to_stored, norm=norm, stores_pre_quant_scale=stores_columns)
        scale, input_amax = _solve_smoothing(weights, format, grid, method, measured, to_stored)
    out = Joint(input_amax=input_amax)
    if scale is not None:
        out.columns = scale.numpy()
    if grid.second:
        amaxes = [
            float((w if scale is None else w * scale).abs().max()) for w in weights.values()
        ]
        out.second_amax = max(amaxes, default=0.0) if len(amaxes) > 1 or measured is not None else 0.0
    gram_II = _gram(measured, scale, method)
    for name, weight_OI in weights.items():
        scaled = weight_OI if scale is None else weight_OI * scale
        amax, codes = _solve_weight(scaled, gram_II, grid, method, out.second_amax)
        if amax is not None:
            out.amax[name] = amax.numpy()
        if codes is not None:
            out.codes[name] = codes.numpy()
    return out


def _solve_smoothing(
    weights: Mapping[str, Tensor],
    format: Format,
    grid: Grid,
    config: Method,
    statistics: Statistics,
    to_stored: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, float]:
    """Factors of columns, as they are stored, and the amax of inputs that are divided by them."""
    weights_OI = list(weights.values())
    amax_I = torch.from_numpy(statistics.amax)
    scale = None
    smooths = config.columns != "none" and format.number.smooths
    trial = None
    if weights and statistics.sample is not None and format.algo in INPUTS:
        trial = smoothquant.Trial(torch.from_numpy(statistics.sample), amax_I, weights_OI)
    clips = smoothquant.CLIPS if config.clips_inputs else (1.0,)
    rms_I = _root_mean_square(statistics)
    sizes = smoothquant.measures(amax_I, rms_I, robust=config.robust)
    if smooths and config.columns == "smooth" and config.alpha is not None:
        scale = smoothquant.factors(sizes[0], weights_OI, config.alpha)
    elif smooths:
        if config.columns == "smooth":
            scales = smoothquant.candidates(sizes, weights_OI, config.alpha_step)
        else:
            measures = [torch.from_numpy(statistics.abs_mean), rms_I]
            share_I = awq.weight_share(weights_OI, grid.columns)
            scales = awq.candidates(measures, share_I, config.alpha_step, exact=config.exact)
        if trial is not None:
            scale, _ = smoothquant.searched(trial, format, grid, scales, clips)
        elif statistics.gram is not None:
            gram_II = torch.from_numpy(statistics.gram) / statistics.num_tokens
            scale = awq.searched(weights_OI, gram_II, grid, scales)
    if scale is not None:
        scale = to_stored(scale)
    if not input_largest(format):
        return scale, 0.0
    if trial is not None and len(clips) > 1:
        ones = torch.ones_like(amax_I) if scale is None else scale
        return scale, trial.input_amax(ones, format, clips)
    return scale, amax_of(
        statistics,
        config.inputs,
        percentile=config.percentile,
        largest=input_largest(format),
        kind=INPUTS[format.algo],
        columns=None if scale is None else scale.numpy(),
    )


def _round_to_stored(scale: Tensor, *, norm: Norm | None, stores_pre_quant_scale: bool) -> Tensor:
    if stores_pre_quant_scale:
        return inverses_stored(scale)
    return scale if norm is None else folded(scale, norm)


def _root_mean_square(statistics: Statistics) -> Tensor:
    return torch.from_numpy(np.sqrt(statistics.square_sum / statistics.num_tokens).astype(np.float32))


def _gram(statistics: Statistics | None, scale: Tensor | None, config: Method) -> Tensor | None:
    """Second moments of the inputs after columns, where weights are decided about by them."""
    if statistics is None or statistics.gram is None or not (config.clips_weights or config.gptq):
        return None
    gram_II = torch.from_numpy(statistics.gram) / statistics.num_tokens
    if scale is not None:
        gram_II /= scale[:, None]
        gram_II /= scale
    return gptq.damped(gram_II, config.damping, config.shrinkage)


def _solve_weight(
    weight_OI: Tensor, gram_II: Tensor | None, grid: Grid, config: Method, global_amax: float
) -> tuple[Tensor | None, Tensor | None]:
    """The amax and the codes of one weight, None where they are its own and the nearest ones."""
    global_amax_ = global_amax or None
    if grid.second and global_amax_ is None:
        global_amax_ = float(weight_OI.abs().max())
    if gram_II is None and not config.mse:
        return None, None
    rows = len(weight_OI)
    if grid.rows == 1:
        rows = max(1, ELEMENTS // weight_OI.shape[1])
    uses_gptq = gram_II is not None and config.gptq and grid.is_integer
    upper, order = None, None
    if gram_II is not None and uses_gptq:
        order = gptq.order_of(gram_II, descending=config.descending)
        upper = gptq.upper_factor(gram_II[order][:, order])
    amaxes, codes = [], []
    for begin in range(0, len(weight_OI), rows):
        part = weight_OI[begin : begin + rows]
        amax = grid.amax(part)
        if gram_II is None:
            amax = clip.by_weight(part, grid, global_amax_)
        elif config.clips_weights:
            amax = clip.by_output(part, gram_II, grid, global_amax_)
        if gram_II is not None and upper is not None and order is not None:
            part_codes = gptq.rounded_columns(part, upper, order, grid, amax, global_amax_)
            for _ in range(config.refinements):
                if not grid.second:
                    amax = gptq.rescaled(part, part_codes, gram_II, grid, amax)
                part_codes = gptq.improved(part, part_codes, gram_II, grid, amax, global_amax_)
            codes.append(part_codes.to(torch.int8))
        amaxes.append(amax)
    amax = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
    return amax, torch.cat(codes) if codes else None
