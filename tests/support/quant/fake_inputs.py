"""Fake-quantized inputs of a module, as `FakeQuantModel` rounds them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megtool.quant.fake_quant.fake_quantize import input_scale, needs_scale, rounded_input
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import ENGINE_INPUTS


def fake_input(
    x_TI: Tensor,
    qparams: WeightQParams,
    *,
    smoothing_scale: Tensor | None = None,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Inputs as the engine multiplies them, in their own dtype; unchanged if it does not round
    them.

    Inputs are divided by the smoothing scale of `qparams` and multiplied by it again
    (`smoothing_scale` replaces it). `largest` merges amaxes `[T, 1]` of rows of which other ranks
    have more columns.
    """
    kind = ENGINE_INPUTS.get(qparams.format.algo)
    if kind is None:
        return x_TI
    if smoothing_scale is None:
        columns = qparams.smoothing_scale
        smoothing_scale = None if columns is None else torch.from_numpy(np.float32(columns))
    scale = float(input_scale(qparams)) if needs_scale(qparams) else 0.0
    return rounded_input(x_TI, kind, scale=scale, smoothing_scale=smoothing_scale, largest=largest)
