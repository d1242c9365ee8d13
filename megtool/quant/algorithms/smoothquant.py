"""SmoothQuant: outliers of inputs moved into weights, by how much being searched.

Guangxuan Xiao and others, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (2023): inputs are divided, and weights multiplied, by
`inputs ** alpha / weight ** (1 - alpha)` of largest magnitudes by column. Here alpha is found for
each point by trying, with the sample of its inputs: the error of the output, that of the inputs'
rounding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid, fake_quantize_inputs, max_input_code
from megtool.quant.recipes.formats import RecipeFormat

MIN_SCALE, MAX_SCALE = 1e-4, 1e4
CLIP_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_EPSILON = 2.0**-31


def compute_scale(amax_I: Tensor, weights_OI: Sequence[Tensor], alpha: float) -> Tensor:
    """What inputs are divided by; 1 for columns that are always zero.

    Source: modelopt 0.47 `model_calib.py` smoothquant, its limits too.
    """
    weight_amax = torch.stack([w.abs().amax(dim=0) for w in weights_OI]).amax(dim=0)
    inverse = weight_amax.pow(1 - alpha) / amax_I.pow(alpha)
    inverse = torch.where((amax_I <= _EPSILON) | (weight_amax <= _EPSILON), 1.0, inverse)
    return 1 / inverse.clamp(MIN_SCALE, MAX_SCALE)


def measure_inputs(amax_I: Tensor, rms_I: Tensor, *, robust: bool) -> tuple[Tensor, ...]:
    """The sizes of inputs, by column, that factors come from: their largest magnitudes, and their
    root mean squares; `robust`: these alone.

    Factors from largest magnitudes bring as many columns as they can up to the same one, which
    looks best on the tokens that said so. Every one of them then has to be above none of its own
    in other text, and of a thousand some always are, and are cut off. By root mean squares, the
    one scale of all inputs is that of the largest outlier, beside its column's usual size, of all
    columns: what all of them have to go by was seen in all of them.
    """
    return (rms_I,) if robust else (amax_I, rms_I)


def propose_scales(
    sizes: Sequence[Tensor], weights_OI: Sequence[Tensor], step: float
) -> Iterator[Tensor]:
    """What is tried: nothing, and alphas up to 1 with each measure of the inputs."""
    yield torch.ones_like(sizes[0])
    steps = round(1 / step)
    for size_I in sizes:
        for i in range(1, steps + 1):
            yield compute_scale(size_I, weights_OI, i / steps)


class OutputErrorTrial:
    """What becomes of the outputs of a point's weights, by its sampled inputs.

    Errors of a row count for less the larger its output is: beside a residual stream that is as
    large, they matter less.
    """

    def __init__(self, sample_TI: Tensor, amax_I: Tensor, weights_OI: Sequence[Tensor]) -> None:
        self.sample, self.amax, self.weights = sample_TI, amax_I, weights_OI
        self.outputs = [sample_TI @ w.T for w in weights_OI]
        power_T = torch.stack([y.square().sum(dim=1) for y in self.outputs]).sum(dim=0)
        self.share_T1 = (1 / (power_T + power_T.mean() + _EPSILON))[:, None]
        self.norms_I = torch.stack([w.square().sum(dim=0) for w in weights_OI]).sum(dim=0)

    def input_amax(
        self, scale_I: Tensor, format: RecipeFormat, ratios: Sequence[float] = CLIP_RATIOS
    ) -> float:
        """The inputs' amax, after columns, of the shares `clips` of the largest magnitude the one
        that loses least. Columns count by the weights that multiply them."""
        amax = float((self.amax / scale_I).max())
        if not max_input_code(format) or len(ratios) == 1:
            return amax
        x = self.sample / scale_I
        weight_I = self.norms_I * scale_I.square()
        best, min_loss = amax, float("inf")
        for ratio in ratios:
            error = fake_quantize_inputs(x, format, amax * ratio) - x
            loss = float((error.square_() * self.share_T1 * weight_I).sum(dtype=torch.float64))
            if loss < min_loss:
                best, min_loss = amax * ratio, loss
        return best

    def error(
        self,
        scale_I: Tensor,
        quantized_OI: Sequence[Tensor],
        format: RecipeFormat,
        input_amax: float,
    ) -> float:
        """The error of the outputs with weights (after columns) that have been rounded."""
        x = fake_quantize_inputs(self.sample / scale_I, format, input_amax)
        loss = 0.0
        for w, y in zip(quantized_OI, self.outputs, strict=True):
            loss += float(((x @ w.T - y).square_() * self.share_T1).sum(dtype=torch.float64))
        return loss


def search_scale(
    trial: OutputErrorTrial,
    format: RecipeFormat,
    grid: Grid,
    scales: Iterator[Tensor],
    ratios: Sequence[float] = CLIP_RATIOS,
) -> tuple[Tensor, float]:
    """Of the factors that are tried those of least error, and the inputs' amax under them."""
    ones = torch.ones(trial.sample.shape[1])
    best, min_loss = (ones, trial.input_amax(ones, format, ratios)), float("inf")
    for scale in scales:
        amax = trial.input_amax(scale, format, ratios)
        quantized = [grid.fake_quantize(w * scale) for w in trial.weights]
        loss = trial.error(scale, quantized, format, amax)
        if loss < min_loss:
            best, min_loss = (scale, amax), loss
    return best
