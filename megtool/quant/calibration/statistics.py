"""Statistics: what calibration keeps of the activations at a point, and how two of them add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError

Floats = NDArray[np.float32]

OCTAVES = (-40, 24)
"""Magnitudes between these powers of two have bins of their own; others go to the outer ones."""

BINS_PER_OCTAVE = 32
MAX_SAMPLE_ROWS = 512
"""Rows of a sample at most."""

BINS = (OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE + 1
"""Bin 0 is for zeros and what is below; bin `1 + i` holds magnitudes whose exponent and first five
bits of mantissa are the i-th. Bins never move, so histograms of any parts add up exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatistics:
    """What was seen at one point, over `num_tokens` rows of `width` columns.

    `amax` `[width]` are largest magnitudes, `abs_sum` and `square_sum` float64 `[width]` sums of
    magnitudes and of squares, all by column; `histogram` int64 `[BINS]` counts magnitudes of all
    columns. Two are kept while a layer is being decided about, and in no artefact, where an
    algorithm asks for them: `gram` float32 `[width, width]`, X^T X (an even one: see `Tally`), and
    `sample` float32 `[at most SAMPLE, width]`, some of the rows.
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
        """Of no tokens."""
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
        """Of inputs of which nothing but the largest magnitude is known, the same in all columns.

        `amax` `[width]` is that; sums and histogram are empty.
        """
        return replace(cls.empty(len(amax)), num_tokens=num_tokens, amax=amax)

    @property
    def has_channels(self) -> bool:
        """Columns were looked at one by one, and their magnitudes counted."""
        return not self.num_tokens or bool(self.histogram.any())

    def merge(self, part: ActivationStatistics) -> ActivationStatistics:
        """Of the tokens of both.

        Raises:
            CalibrationError: they are not of the same number of columns.
        """
        if self.amax.shape != part.amax.shape:
            raise CalibrationError(
                f"statistics of {len(self.amax)} and of {len(part.amax)} columns do not add up",
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
        """Mean magnitudes by column."""
        return (self.abs_sum / max(self.num_tokens, 1)).astype(np.float32)


def merge_samples(parts: Sequence[tuple[Floats | None, int]]) -> Floats | None:
    """One sample of all parts, given those of each and its number of tokens.

    Each part has as large a share of it as of the tokens, evenly spaced.
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
