"""Minimum, maximum, mean, standard deviation and histogram of tensors; zeros, NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megtool.dtypes import DType
from megtool.tensors.box import Ints, numel
from megtool.tensors.placement import Placement, narrow
from megtool.transport.cast import numeric_values
from megtool.transport.reading.parallel_scan import TILE_BYTES, packed_row_depth, split_placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import ScanPart, run_scan
from megtool.transport.strided import Array

_CHUNK_ELEMENTS = 1 << 16  # elements; as float64 they stay in the L2 cache
_NUM_BINS = 512  # sign and exponent of float32
_BIAS = 127
_LOWEST_POWER = -40  # smaller magnitudes are counted with these


@dataclass(slots=True, eq=False)
class TensorStatistics:
    """Statistics of one tensor.

    `min`, `max`, `mean` and `std` (of the population, summed in float64) are those of the finite
    elements; None if there are none. A complex number counts as two. `bins` counts them by sign and
    exponent, those of float32.
    """

    count: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    _m2: float = 0.0
    bins: Ints = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStatistics):
            return NotImplemented
        numbers = all(getattr(self, name) == getattr(other, name) for name in _NUMBERS)
        return numbers and np.array_equal(self.bins, other.bins)

    @property
    def largest(self) -> float | None:
        """The largest magnitude."""
        if self.min is None or self.max is None:
            return None
        return float(max(abs(self.min), abs(self.max)))

    @property
    def histogram(self) -> tuple[int, list[int], int, list[int]] | None:
        """Counts by power of two: the lowest power, the counts of negative numbers from it on,
        zeros, and the counts of positive ones. The lowest includes all smaller magnitudes."""
        bins = self.bins.tolist()
        negative, positive = bins[_NUM_BINS // 2 : -1], bins[: _NUM_BINS // 2 - 1]
        if not any(negative) and not any(positive):
            return None
        tiny = positive[0] + negative[0] - self.zeros  # float32 has no exponent for these
        sides = []
        for side, smaller in ((negative, 0), (positive, max(tiny, 0))):
            low = _LOWEST_POWER + _BIAS
            sides.append([sum(side[1 : low + 1]) + smaller, *side[low + 1 :]])
        used = [i for i, pair in enumerate(zip(*sides, strict=True)) if any(pair)]
        if not used:
            return 0, [], self.zeros, []
        first, last = used[0], used[-1] + 1
        return first + _LOWEST_POWER, sides[0][first:last], self.zeros, sides[1][first:last]

    @property
    def std(self) -> float | None:
        """The square root of the mean squared distance from the mean."""
        finite = self.count - self.nan - self.inf
        return math.sqrt(self._m2 / finite) if finite else None

    def add(self, array: Array, kind: DType) -> None:
        """Add elements, as stored in a file."""
        for start in range(0, array.size, _CHUNK_ELEMENTS):
            self.merge(_measure_chunk(array[start : start + _CHUNK_ELEMENTS], kind))

    def merge(self, statistics: TensorStatistics) -> None:
        """Add the statistics of other elements."""
        num_finite = self.count - self.nan - self.inf
        num_added = statistics.count - statistics.nan - statistics.inf
        self.count += statistics.count
        self.zeros += statistics.zeros
        self.nan += statistics.nan
        self.inf += statistics.inf
        self.bins = self.bins + statistics.bins
        if (
            not num_added
            or statistics.mean is None
            or statistics.min is None
            or statistics.max is None
        ):
            return
        if self.mean is None or self.min is None or self.max is None:
            self.min, self.max, self.mean, self._m2 = (
                statistics.min,
                statistics.max,
                statistics.mean,
                statistics._m2,
            )
            return
        self.min, self.max = min(self.min, statistics.min), max(self.max, statistics.max)
        distance, share = statistics.mean - self.mean, num_added / (num_finite + num_added)
        self.mean += distance * share
        self._m2 += statistics._m2 + distance * distance * share * num_finite

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        names = ("min", "max", "mean", "std", "zeros", "nan", "inf", "histogram")
        return {name: getattr(self, name) for name in names}


def _measure_chunk(array: Array, kind: DType) -> TensorStatistics:
    x = numeric_values(array, kind)
    if kind.name == "complex64":
        x = x.view("<f4")
    if kind.name == "bool":
        x = x.view(np.uint8)
    out = TensorStatistics(count=x.size, zeros=x.size - int(np.count_nonzero(x)))
    if x.dtype.kind == "f":
        finite = np.isfinite(x)
        if not finite.all():
            out.nan = int(np.isnan(x).sum())
            x = x[finite]
            out.inf = out.count - out.nan - x.size
    if not x.size:
        return out
    out.min, out.max = x.min().item(), x.max().item()
    with np.errstate(over="ignore", invalid="ignore"):
        single = x.astype("<f4", copy=False)
    exponents = np.minimum(single.view("<u4") & 0x7FFFFFFF, 0x7F7FFFFF) >> 23
    signs = (single.view("<u4") >> 31) << 8
    out.bins = np.bincount(exponents | signs, minlength=_NUM_BINS)
    with np.errstate(over="ignore", invalid="ignore"):  # squares of float64 numbers may overflow
        y = x.astype(np.float64)
        out.mean = float(y.mean())
        y -= out.mean
        out._m2 = float(np.square(y, out=y).sum())
    return out


def measure_tensors(
    reader: CheckpointReader,
    names: Sequence[str],
    *,
    threads: int = 1,
    by_row: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> dict[str, TensorStatistics]:
    """Statistics of stored tensors; every element is read once.

    Those in `by_row` hold a layer in each row of their first dimension: the statistics of row i are
    those of `NAME[i]`. `progress` receives numbers of bytes, from any thread. With `scan`, workers
    share it out.
    """
    out = {name: TensorStatistics() for name in names}
    owners: dict[str, str] = {}
    jobs: list[tuple[str, Placement]] = []
    for name in names:
        stored = reader.catalogue[name]
        full_placement = Placement.identity(name, stored.shape)
        rows = [("", full_placement)]
        if name in by_row:
            start, end = (0,) * (len(stored.shape) - 1), stored.shape[1:]
            rows = [
                (f"[{i}]", narrow(full_placement, (i, *start), (i + 1, *end)))
                for i in range(stored.shape[0])
            ]
        for row, placement in rows:
            cuts = split_placement(
                placement, stored.dtype.itemsize, packed_row_depth(placement, stored)
            )
            jobs += [(name + row, narrow(placement, lo, hi)) for _, lo, hi in cuts]
            if row:
                owners[name + row] = name

    def work(job: tuple[str, Placement]) -> list[Any]:
        statistics, view = TensorStatistics(), reader.open_canonical(job[1])
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for _, tile in tiles:
                statistics.add(tile, view.dtype)
                if progress is not None:
                    progress(tile.nbytes)
        return [*(getattr(statistics, name) for name in _NUMBERS), statistics.bins.tolist()]

    results = run_scan(
        scan,
        jobs,
        work,
        name=lambda job: repr((job[0], job[1].base, job[1].shape)),
        size=lambda job: numel(job[1].shape) * reader.catalogue[job[1].stored].dtype.itemsize,
        threads=threads,
    )
    for (name, _), values in zip(jobs, results, strict=True):
        if values is not None:
            *numbers, bins = values
            statistics = TensorStatistics(*numbers)
            statistics.bins = np.array(bins, np.int64)
            out.setdefault(name, TensorStatistics()).merge(statistics)
            if name in owners:
                out[owners[name]].merge(statistics)
    return out


_NUMBERS = ("count", "zeros", "nan", "inf", "min", "max", "mean", "_m2")
