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
    known = seen if seen is not None and seen.num_tokens else None
    columns, input_amax = None, 0.0
    if known is not None:
        stored = partial(_stored, norm=norm, stores_columns=stores_columns)
        columns, input_amax = _columns(weights, format, grid, method, known, stored)
    out = Joint(input_amax=input_amax)
    if columns is not None:
        out.columns = columns.numpy()
    if grid.second:
        tops = [
            float((w if columns is None else w * columns).abs().max()) for w in weights.values()
        ]
        out.second_amax = max(tops, default=0.0) if len(tops) > 1 or known is not None else 0.0
    gram_II = _gram(known, columns, method)
    for name, weight_OI in weights.items():
        scaled = weight_OI if columns is None else weight_OI * columns
        amax, codes = _weight(scaled, gram_II, grid, method, out.second_amax)
        if amax is not None:
            out.amax[name] = amax.numpy()
        if codes is not None:
            out.codes[name] = codes.numpy()
    return out


def _columns(
    weights: Mapping[str, Tensor],
    format: Format,
    grid: Grid,
    method: Method,
    seen: Statistics,
    stored: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, float]:
    """Factors of columns, as they are stored, and the amax of inputs that are divided by them."""
    all_OI = list(weights.values())
    amax_I = torch.from_numpy(seen.amax)
    columns = None
    smooths = method.columns != "none" and format.number.smooths
    trial = None
    if weights and seen.sample is not None and format.algo in INPUTS:
        trial = smoothquant.Trial(torch.from_numpy(seen.sample), amax_I, all_OI)
    clips = smoothquant.CLIPS if method.clips_inputs else (1.0,)
    rms_I = _root_mean_square(seen)
    sizes = smoothquant.measures(amax_I, rms_I, robust=method.robust)
    if smooths and method.columns == "smooth" and method.alpha is not None:
        columns = smoothquant.factors(sizes[0], all_OI, method.alpha)
    elif smooths:
        if method.columns == "smooth":
            tried = smoothquant.candidates(sizes, all_OI, method.alpha_step)
        else:
            measures = [torch.from_numpy(seen.abs_mean), rms_I]
            share_I = awq.weight_share(all_OI, grid.columns)
            tried = awq.candidates(measures, share_I, method.alpha_step, exact=method.exact)
        if trial is not None:
            columns, _ = smoothquant.searched(trial, format, grid, tried, clips)
        elif seen.gram is not None:
            gram_II = torch.from_numpy(seen.gram) / seen.num_tokens
            columns = awq.searched(all_OI, gram_II, grid, tried)
    if columns is not None:
        columns = stored(columns)
    if not input_largest(format):
        return columns, 0.0
    if trial is not None and len(clips) > 1:
        ones = torch.ones_like(amax_I) if columns is None else columns
        return columns, trial.input_amax(ones, format, clips)
    return columns, amax_of(
        seen,
        method.inputs,
        percentile=method.percentile,
        largest=input_largest(format),
        kind=INPUTS[format.algo],
        columns=None if columns is None else columns.numpy(),
    )


def _stored(columns: Tensor, *, norm: Norm | None, stores_columns: bool) -> Tensor:
    if stores_columns:
        return inverses_stored(columns)
    return columns if norm is None else folded(columns, norm)


def _root_mean_square(seen: Statistics) -> Tensor:
    return torch.from_numpy(np.sqrt(seen.square_sum / seen.num_tokens).astype(np.float32))


def _gram(seen: Statistics | None, columns: Tensor | None, method: Method) -> Tensor | None:
    """Second moments of the inputs after columns, where weights are decided about by them."""
    if seen is None or seen.gram is None or not (method.clips_weights or method.gptq):
        return None
    gram_II = torch.from_numpy(seen.gram) / seen.num_tokens
    if columns is not None:
        gram_II /= columns[:, None]
        gram_II /= columns
    return gptq.damped(gram_II, method.damping, method.shrinkage)


def _weight(
    weight_OI: Tensor, gram_II: Tensor | None, grid: Grid, method: Method, second_amax: float
) -> tuple[Tensor | None, Tensor | None]:
    """The amax and the codes of one weight, None where they are its own and the nearest ones."""
    second = second_amax or None
    if grid.second and second is None:
        second = float(weight_OI.abs().max())
    if gram_II is None and not method.mse:
        return None, None
    rows = len(weight_OI)
    if grid.rows == 1:
        rows = max(1, ELEMENTS // weight_OI.shape[1])
    chooses = gram_II is not None and method.gptq and grid.is_integer
    upper, order = None, None
    if gram_II is not None and chooses:
        order = gptq.order_of(gram_II, descending=method.descending)
        upper = gptq.upper_factor(gram_II[order][:, order])
    amaxes, codes = [], []
    for begin in range(0, len(weight_OI), rows):
        part = weight_OI[begin : begin + rows]
        amax = grid.amax(part)
        if gram_II is None:
            amax = clip.by_weight(part, grid, second)
        elif method.clips_weights:
            amax = clip.by_output(part, gram_II, grid, second)
        if gram_II is not None and upper is not None and order is not None:
            found = gptq.rounded_columns(part, upper, order, grid, amax, second)
            for _ in range(method.refinements):
                if not grid.second:
                    amax = gptq.rescaled(part, found, gram_II, grid, amax)
                found = gptq.improved(part, found, gram_II, grid, amax, second)
            codes.append(found.to(torch.int8))
        amaxes.append(amax)
    amax = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
    return amax, torch.cat(codes) if codes else None
