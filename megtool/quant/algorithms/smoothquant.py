"""SmoothQuant: outliers of inputs are moved into weights; the migration strength is searched.

Guangxuan Xiao and others, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (2023): inputs are divided, and weights multiplied, by
`inputs ** alpha / weight ** (1 - alpha)` of the amax by channel. Here alpha is searched for each
activation site by the output error on sampled inputs, including the error of quantized inputs.
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
    """Compute the smoothing scale, which inputs are divided by; 1 for channels that are all zero.

    Source: modelopt 0.47 `model_calib.py` smoothquant, including its limits.
    """
    weight_amax = torch.stack([w.abs().amax(dim=0) for w in weights_OI]).amax(dim=0)
    inverse = weight_amax.pow(1 - alpha) / amax_I.pow(alpha)
    inverse = torch.where((amax_I <= _EPSILON) | (weight_amax <= _EPSILON), 1.0, inverse)
    return 1 / inverse.clamp(MIN_SCALE, MAX_SCALE)


def measure_inputs(amax_I: Tensor, rms_I: Tensor, *, robust: bool) -> tuple[Tensor, ...]:
    """The input sizes by channel that scales are computed from: amax and RMS; `robust`: RMS only.

    Scales from the amax bring as many channels as possible to the same maximum, which is best for
    the calibration data. On other text some of a thousand channels always exceed their calibrated
    amax and are clipped. With RMS, the one scale of all inputs comes from the largest outlier
    relative to its channel's RMS over all channels, which is estimated from all of them.
    """
    return (rms_I,) if robust else (amax_I, rms_I)


def propose_scales(
    sizes: Sequence[Tensor], weights_OI: Sequence[Tensor], step: float
) -> Iterator[Tensor]:
    """Yield candidate scales: ones, and alphas up to 1 with each measure of the inputs."""
    yield torch.ones_like(sizes[0])
    steps = round(1 / step)
    for size_I in sizes:
        for i in range(1, steps + 1):
            yield compute_scale(size_I, weights_OI, i / steps)


class OutputErrorTrial:
    """The output error of the weights of an activation site on its sampled inputs.

    Errors of a row are divided by the size of its output: they matter less in a residual stream
    that is as large.
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
        """Search the amax of smoothed inputs over the fractions `ratios` of the largest magnitude.
        Errors of channels are weighted by the weights that multiply them."""
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
        """The output error with smoothed and quantized weights."""
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
    """Find the candidate scale with the least output error, and the amax of inputs under it."""
    ones = torch.ones(trial.sample.shape[1])
    best, min_loss = (ones, trial.input_amax(ones, format, ratios)), float("inf")
    for scale in scales:
        amax = trial.input_amax(scale, format, ratios)
        quantized = [grid.fake_quantize(w * scale) for w in trial.weights]
        loss = trial.error(scale, quantized, format, amax)
        if loss < min_loss:
            best, min_loss = (scale, amax), loss
    return best
