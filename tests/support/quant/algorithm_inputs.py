"""Inputs of a layer as models have them: correlated, a few columns far larger than the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megtool.quant.statistics.site_statistics import (
    BINS,
    BINS_PER_OCTAVE,
    OCTAVES,
    ActivationStatistics,
)


def rows(count: int, width: int, *, seed: int = 0) -> Tensor:
    """`[count, width]`."""
    of = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, width, generator=of)
    mixed += mixed @ torch.randn(width, width, generator=of) / width**0.5
    sizes = torch.exp(torch.randn(width, generator=of))
    sizes[:: max(width // 3, 1)] *= 20
    return mixed * sizes


def weight(out: int, width: int, *, seed: int = 1) -> Tensor:
    """`[out, width]`."""
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) * 0.1


def statistics(x_TI: Tensor, *, full: bool = True) -> ActivationStatistics:
    """What a recorder keeps of them."""
    x = x_TI.numpy()
    size = np.abs(x)
    with np.errstate(divide="ignore"):
        bins = np.floor((np.log2(size) - OCTAVES[0]) * BINS_PER_OCTAVE).clip(-1, BINS - 2) + 1
    return ActivationStatistics(
        num_tokens=len(x),
        amax=size.max(axis=0),
        abs_sum=size.sum(axis=0, dtype=np.float64),
        square_sum=(size.astype(np.float64) ** 2).sum(axis=0),
        histogram=np.bincount(bins.astype(np.int64).ravel(), minlength=BINS),
        gram=x.T @ x if full else None,
        sample=x[:512].copy() if full else None,
    )
