"""Blends of several data sets by share or in sequence, identical on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError

_STRETCH = 1 << 14


class Blend:
    """Maps sample number n to a data set and a sample of it.

    Each sample is from the data set that is farthest behind its share (the first of equals), so
    every data set is always within one sample of its share. This is the rule of Megatron's blended
    data sets (`build_blending_indices`).

    Raises:
        UsageError: a share is no positive number.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        if not shares or not all(np.isfinite(s) and s > 0 for s in shares):
            raise UsageError(
                f"shares {list(shares)}", hint="give one positive number for each data set"
            )
        self.shares = np.asarray(shares, np.float64) / float(np.sum(shares))
        self._before: list[NDArray[np.int64]] = [np.zeros(len(shares), np.int64)]
        self._chosen: list[NDArray[np.int16]] = []

    def place(self, sample: int) -> tuple[int, int]:
        """The data set of a sample, and its number there."""
        stretch, offset = divmod(sample, _STRETCH)
        while len(self._chosen) <= stretch:
            self._extend()
        chosen = self._chosen[stretch]
        dataset_id = int(chosen[offset])
        return dataset_id, int(
            self._before[stretch][dataset_id] + (chosen[:offset] == dataset_id).sum()
        )

    @property
    def facts(self) -> list[float]:
        """What determines the order."""
        return [float(s) for s in self.shares]

    def _extend(self) -> None:
        """Choose for another stretch of samples."""
        have = self._before[-1].astype(np.float64)
        begin = len(self._chosen) * _STRETCH
        chosen = np.empty(_STRETCH, np.int16)
        shares, counts = self.shares.tolist(), have.tolist()
        for n in range(_STRETCH):
            point = float(max(begin + n, 1))
            behind = [s * point - t for s, t in zip(shares, counts, strict=True)]
            dataset_id = behind.index(max(behind))
            chosen[n] = dataset_id
            counts[dataset_id] += 1
        self._chosen.append(chosen)
        self._before.append(np.asarray(counts, np.int64))


class Chain:
    """All samples of one data set, then all of the next, repeatedly: the order of an evaluation."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(sizes, np.int64))

    def place(self, sample: int) -> tuple[int, int]:
        """The data set of a sample, and its number there."""
        epoch, offset = divmod(sample, int(self._ends[-1]))
        dataset_id = int(np.searchsorted(self._ends, offset, side="right"))
        begin = int(self._ends[dataset_id - 1]) if dataset_id else 0
        return dataset_id, epoch * (int(self._ends[dataset_id]) - begin) + offset - begin

    @property
    def facts(self) -> list[float]:
        """What determines the order."""
        return [float(n) for n in self._ends]
