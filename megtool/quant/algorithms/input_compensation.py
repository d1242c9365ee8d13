"""Weights that make up for the rounding of their inputs.

Engines round inputs x to r. With one factor for each channel, r = a x + e, where the remainder e is
uncorrelated with x: small channels beside an outlier round to zero (a = 0), others keep their size
(a = 1), and all have noise. The weights that come closest to W x on such inputs are
W H A (A H A + E)^-1, with H the second moments of x, and A and E the diagonals of a and of the
mean of e^2. Codes are then chosen for these weights under A H A + E.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megtool.errors import CalibrationError

_TINY = torch.finfo(torch.float32).tiny
_MAX_FACTOR = 1.5


def fit_rounding(
    sample_TI: Tensor, rounded_TI: Tensor, *, normalize_tokens: bool = False
) -> tuple[Tensor, Tensor]:
    """Fit the factor of each channel, and its noise as a share of the channel's second moment.

    `normalize_tokens` weighs rows as the Gram matrix does (see `RunningStatistics`).
    """
    share_T1 = torch.ones(len(sample_TI), 1)
    if normalize_tokens:
        share_T1 = 1 / sample_TI.norm(dim=1, keepdim=True).clamp_min(_TINY)
    power_I = (share_T1 * sample_TI.square()).sum(dim=0)
    is_used = power_I > 0
    power_I = torch.where(is_used, power_I, 1.0)
    factor_I = (share_T1 * sample_TI * rounded_TI).sum(dim=0) / power_I
    factor_I = torch.where(is_used, factor_I.clamp(0.0, _MAX_FACTOR), 1.0)
    error = rounded_TI - factor_I * sample_TI
    noise_I = (share_T1 * error.square()).sum(dim=0) / power_I
    return factor_I, torch.where(is_used, noise_I, 0.0)


def compensate_inputs(
    weights: Mapping[str, Tensor], gram_II: Tensor, factor_I: Tensor, noise_I: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights `[out, in]` that are best on rounded inputs, and the second moments of these.

    `gram_II` is damped; factors and noise are those of `fit_rounding`.

    Raises:
        CalibrationError: the second moments are not positive definite.
    """
    cross_II = gram_II * factor_I
    rounded_II = cross_II * factor_I[:, None]
    diagonal = rounded_II.diagonal()
    diagonal += noise_I * gram_II.diagonal()
    # Channels that always round to zero have no second moment: their weights do not matter.
    mean = float(gram_II.diagonal().mean())
    diagonal += torch.where(diagonal <= 1e-6 * mean, 1e-2 * mean, 0.0)
    try:
        lower = torch.linalg.cholesky(rounded_II.double())
    except RuntimeError as error:  # torch's LinAlgError is one
        raise CalibrationError(
            f"the second moments of rounded inputs cannot be inverted ({error})",
            hint="more calibration data, or a larger damping",
        ) from None
    out = {}
    for name, weight_OI in weights.items():
        right = (weight_OI @ cross_II).T.double()
        out[name] = torch.cholesky_solve(right, lower).T.float().contiguous()
    return out, rounded_II
