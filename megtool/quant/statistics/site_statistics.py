"""Activation statistics of one site, and how they are merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError

Floats = NDArray[np.float32]

OCTAVES = (-40, 24)
"""Magnitudes between these powers of two have their own bins; others go to the outer bins."""

BINS_PER_OCTAVE = 32
MAX_SAMPLE_ROWS = 512
"""Maximum number of sampled rows."""

BINS = (OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE + 1
"""Bin 0 counts zeros and smaller magnitudes; bin `1 + i` counts magnitudes with the i-th exponent
and leading five mantissa bits. Bins are fixed, so histograms can be added exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatistics:
    """Statistics of one site over `num_tokens` rows of `width` channels.

    `amax` `[width]` is the largest magnitude, `abs_sum` and `square_sum` float64 `[width]` are sums
    of magnitudes and squares, all by channel; `histogram` int64 `[BINS]` counts magnitudes of all
    channels. Two are only kept while a layer is solved, and not in calibration files: `gram`
    float32 `[width, width]`, X^T X (or token-normalized: see `RunningStatistics`), and `sample`
    float32 `[at most MAX_SAMPLE_ROWS, width]`, sampled rows.
    """

    num_tokens: int
    amax: Floats
    abs_sum: NDArray[np.float64]
    square_sum: NDArray[np.float64]
    histogram: NDArray[np.int64]
    gram: Floats | None = None
    sample: Floats | None = None

    @classmethod
    def empty(cls, width: int, *, gram: bool = False) -> ActivationStatistics:
        """Statistics of no tokens."""
        return cls(
            num_tokens=0,
            amax=np.zeros(width, np.float32),
            abs_sum=np.zeros(width, np.float64),
            square_sum=np.zeros(width, np.float64),
            histogram=np.zeros(BINS, np.int64),
            gram=np.zeros((width, width), np.float32) if gram else None,
        )

    @classmethod
    def from_amax(cls, amax: Floats, *, num_tokens: int) -> ActivationStatistics:
        """Statistics with only a per-tensor amax, repeated in `amax` `[width]`.

        Sums and histogram are empty.
        """
        return replace(cls.empty(len(amax)), num_tokens=num_tokens, amax=amax)

    @property
    def has_channels(self) -> bool:
        """Whether there are per-channel statistics and a histogram."""
        return not self.num_tokens or bool(self.histogram.any())

    def merge(self, part: ActivationStatistics) -> ActivationStatistics:
        """Merge with the statistics of other tokens.

        Raises:
            CalibrationError: different numbers of channels.
        """
        if self.amax.shape != part.amax.shape:
            raise CalibrationError(
                f"statistics of {len(self.amax)} and of {len(part.amax)} channels cannot be merged",
                hint="they are of different models",
            )
        has_gram = self.gram is not None and part.gram is not None
        return ActivationStatistics(
            num_tokens=self.num_tokens + part.num_tokens,
            amax=np.maximum(self.amax, part.amax),
            abs_sum=self.abs_sum + part.abs_sum,
            square_sum=self.square_sum + part.square_sum,
            histogram=self.histogram + part.histogram,
            gram=self.gram + part.gram if has_gram else None,  # type: ignore[operator]
            sample=merge_samples([(s.sample, s.num_tokens) for s in (self, part)]),
        )

    @property
    def abs_mean(self) -> Floats:
        """The mean magnitude by channel."""
        return (self.abs_sum / max(self.num_tokens, 1)).astype(np.float32)


def merge_samples(parts: Sequence[tuple[Floats | None, int]]) -> Floats | None:
    """Merge samples, given the rows of each and its number of tokens.

    Each part contributes in proportion to its tokens, with evenly spaced rows.
    """
    samples = [(rows, tokens) for rows, tokens in parts if rows is not None and len(rows)]
    if not samples:
        return next((rows for rows, _ in parts if rows is not None), None)
    total = sum(tokens for _, tokens in samples)
    share = min(MAX_SAMPLE_ROWS / total, *(len(rows) / tokens for rows, tokens in samples))
    selected = []
    for rows, tokens in samples:
        count = min(len(rows), math.floor(share * tokens + 1e-9))
        selected.append(rows[np.arange(count) * len(rows) // max(count, 1)])
    return np.concatenate(selected)
