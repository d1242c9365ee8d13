"""GPTQ: columns of a weight are quantized in order, and later ones compensate for the error.

Elias Frantar and others, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2023): with H the Gram matrix of the inputs, the error of column i, divided by the
i-th diagonal of the upper Cholesky factor of H^-1, is taken from the columns after it times that
factor's row. Scales are fixed in advance (static groups), so columns may be taken in any order.

Codes are integers or FP4 numbers: what is said of rounding holds for any grid. The remaining error
tr((W-Q) H (W-Q)^T) is quadratic and is then reduced by coordinate descent: in
turn, each column gets the best codes with all others fixed (`refine_codes`; Kayhan Behdin and
others, "QuantEase", 2023), and each group the best scale for its codes (`refit_amax`). Neither
step can increase the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.errors import CalibrationError
from megtool.quant.algorithms.weight_grid import Grid

BLOCK = 64


def damp_gram(gram_II: Tensor, damping: float, shrinkage: float = 0.0) -> Tensor:
    """Regularize `gram_II`: add `damping` times the mean of the diagonal to the diagonal, replace
    zeros on it, and scale off-diagonal elements by `1 - shrinkage`. Correlations in a few thousand
    tokens are partly sampling noise, and compensating by them does worse on other text."""
    out = gram_II * (1 - shrinkage)
    diagonal = out.diagonal()
    diagonal.copy_(gram_II.diagonal())
    mean = float(diagonal.mean()) or 1.0
    diagonal += torch.where(diagonal == 0, mean, 0.0)
    diagonal += damping * mean
    return out


def order_columns(gram_II: Tensor, *, desc_act: bool) -> Tensor:
    """The order in which columns are quantized: natural, or by descending input size."""
    if not desc_act:
        return torch.arange(len(gram_II))
    return torch.argsort(gram_II.diagonal(), descending=True, stable=True)


def quantize_columns(
    weight_OI: Tensor,
    upper_II: Tensor,
    order_I: Tensor,
    grid: Grid,
    amax: Tensor,
    global_amax: float | None = None,
) -> Tensor:
    """Quantize columns in `order_I`: values of codes `[out, in]`, float32, under scales from
    `amax`. `upper_II` is `compute_inverse_cholesky` of the Gram matrix in that order."""
    scale = grid.broadcast(grid.scale(amax, global_amax))
    scale = scale.expand_as(weight_OI)[:, order_I].T.contiguous()
    remaining = weight_OI[:, order_I].T.contiguous()
    codes = torch.empty_like(remaining)
    errors = torch.empty(BLOCK, remaining.shape[1])
    for begin in range(0, len(remaining), BLOCK):
        end = min(begin + BLOCK, len(remaining))
        for i in range(begin, end):
            code = grid.nearest_codes(remaining[i] / scale[i])
            codes[i] = code
            error = remaining[i] - grid.requantize(code * scale[i], global_amax)
            error /= upper_II[i, i]
            errors[i - begin] = error
            remaining[i + 1 : end].addr_(upper_II[i, i + 1 : end], error, alpha=-1)
        remaining[end:].addmm_(upper_II[begin:end, end:].T, errors[: end - begin], alpha=-1)
    out = torch.empty_like(weight_OI)
    out[:, order_I] = codes.T
    return out


def refine_codes(
    weight_OI: Tensor,
    codes_OI: Tensor,
    gram_II: Tensor,
    grid: Grid,
    amax: Tensor,
    global_amax: float | None = None,
    *,
    passes: int = 1,
) -> Tensor:
    """Refine codes column by column, `passes` times over all columns."""
    scale = grid.broadcast(grid.scale(amax, global_amax))
    scale = scale.expand_as(weight_OI).T.contiguous()
    codes = codes_OI.T.contiguous()
    values = grid.requantize(codes * scale, global_amax)
    residual = gram_II @ (weight_OI.T - values)  # half the negative gradient, [in, out]
    steps = torch.empty(BLOCK, codes.shape[1])
    for _ in range(passes):
        for begin in range(0, len(codes), BLOCK):
            end = min(begin + BLOCK, len(codes))
            for i in range(begin, end):
                target = values[i] + residual[i] / gram_II[i, i]
                code = grid.nearest_codes(target / scale[i])
                value = grid.requantize(code * scale[i], global_amax)
                if (
                    grid.is_integer and grid.has_global_scale
                ):  # the nearest integer need not have the nearest value
                    worse = (value - target).abs() > (values[i] - target).abs()
                    code, value = (
                        torch.where(worse, codes[i], code),
                        torch.where(worse, values[i], value),
                    )
                step = value - values[i]
                codes[i], values[i], steps[i - begin] = code, value, step
                residual[begin:end].addr_(gram_II[begin:end, i], step, alpha=-1)
            block_steps = steps[: end - begin]
            residual[:begin].addmm_(gram_II[:begin, begin:end], block_steps, alpha=-1)
            residual[end:].addmm_(gram_II[end:, begin:end], block_steps, alpha=-1)
    return codes.T.contiguous()


def refit_amax(
    weight_OI: Tensor, codes_OI: Tensor, gram_II: Tensor, grid: Grid, amax: Tensor
) -> Tensor:
    """Refit the `amax` to the codes, row by row by least squares; rows that would not improve, or
    whose scales would not be positive, keep their `amax`."""
    out, width = weight_OI.shape
    group_size = grid.columns or width
    groups = width // group_size
    codes = codes_OI.reshape(out, groups, group_size)
    right_side = (codes_OI * (weight_OI @ gram_II)).reshape(out, groups, group_size).sum(dim=2)
    normal = torch.empty(out, groups, groups)
    for g in range(groups):
        rows = slice(g * group_size, (g + 1) * group_size)
        projected = codes[:, g] @ gram_II[rows]
        normal[:, :, g] = (codes_OI * projected).reshape(out, groups, group_size).sum(dim=2)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(dim=1, keepdim=True)
    diagonal += 1e-6 * mean + (mean == 0)
    scales = torch.linalg.solve(normal.double(), right_side.double()).float()
    current = (amax / grid.largest).reshape(out, groups)
    good = torch.isfinite(scales) & (scales > 0.25 * current) & (scales < 4 * current)
    before = row_errors(weight_OI, codes_OI, current, gram_II)
    after = row_errors(weight_OI, codes_OI, torch.where(good, scales, current), gram_II)
    better = (after < before)[:, None] & good.all(dim=1, keepdim=True)
    return (torch.where(better, scales, current) * grid.largest).reshape(amax.shape)


def refit_block_amax(
    weight_OI: Tensor,
    codes_OI: Tensor,
    gram_II: Tensor,
    grid: Grid,
    amax: Tensor,
    global_amax: float | None = None,
) -> Tensor:
    """Refit the `amax` of groups to the codes, for scales that are rounded themselves.

    In turn, each group gets the stored scale nearest to the best one with everything else fixed,
    if that lowers the error of its row.
    """
    size = grid.columns
    codes = codes_OI.T.contiguous()
    best = amax.T.contiguous()
    scales = grid.scale(best, global_amax)
    values = codes * scales.repeat_interleave(size, dim=0)
    residual = gram_II @ (weight_OI.T - values)
    for g in range(len(best)):
        rows = slice(g * size, (g + 1) * size)
        slope = (codes[rows] * residual[rows]).sum(dim=0)
        curvature = (codes[rows] * (gram_II[rows, rows] @ codes[rows])).sum(dim=0)
        target = scales[g] + slope / curvature.clamp_min(torch.finfo(torch.float32).tiny)
        candidate = torch.where(target > 0, target * grid.largest, best[g])
        if global_amax is not None:
            candidate.clamp_max_(global_amax)
        scale = grid.scale(candidate, global_amax)
        step = scale - scales[g]
        better = step * (step * curvature - 2 * slope) < 0
        best[g] = torch.where(better, scale * grid.largest, best[g])
        step = torch.where(better, step, 0.0)
        residual.addmm_(gram_II[:, rows], codes[rows] * step, alpha=-1)
    return best.T.contiguous()


def row_errors(weight_OI: Tensor, codes_OI: Tensor, scales: Tensor, gram_II: Tensor) -> Tensor:
    """The squared error of each output row."""
    group_size = weight_OI.shape[1] // scales.shape[1]
    error = weight_OI - codes_OI * scales.repeat_interleave(group_size, dim=1)
    return ((error @ gram_II) * error).sum(dim=1)


def compute_inverse_cholesky(gram_II: Tensor) -> Tensor:
    """Compute the upper Cholesky factor of the inverse of a damped Gram matrix.

    Raises:
        CalibrationError: the matrix is not positive definite.
    """
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram_II.double()))
        upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    except RuntimeError as error:  # torch's LinAlgError is one
        raise CalibrationError(
            f"the second moments of inputs cannot be inverted ({error})",
            hint="more calibration data, or a larger damping",
        ) from None
    return upper.float()
