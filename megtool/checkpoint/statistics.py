"""Minimum, maximum, mean and standard deviation of tensors, and counts of zeros, NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.checkpoint.parallel_scan import TILE_BYTES, packed_row_depth, split_placement
from megtool.checkpoint.read import CheckpointReader
from megtool.checkpoint.transport.cast import numeric_values
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.workers.shared_scan import ScanPart, run_scan
from megtool.dtypes import DType
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow

_CHUNK_ELEMENTS = 1 << 16  # elements; as float64 they stay in the L2 cache


@dataclass(slots=True)
class TensorStatistics:
    """Statistics of one tensor.

    `min`, `max`, `mean` and `std` (of the population, summed in float64) are those of the finite
    elements; None if there are none. A complex number counts as two.
    """

    count: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    _m2: float = 0.0

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
        names = ("min", "max", "mean", "std", "zeros", "nan", "inf")
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
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> dict[str, TensorStatistics]:
    """Statistics of stored tensors; every element is read once.

    `progress` receives numbers of bytes, from any thread. With `scan`, workers share it out.
    """
    out = {name: TensorStatistics() for name in names}
    jobs: list[tuple[str, Placement]] = []
    for name in names:
        stored = reader.catalogue[name]
        full_placement = Placement.identity(name, stored.shape)
        cuts = split_placement(
            full_placement, stored.dtype.itemsize, packed_row_depth(full_placement, stored)
        )
        jobs += [(name, narrow(full_placement, lo, hi)) for _, lo, hi in cuts]

    def work(job: tuple[str, Placement]) -> list[Any]:
        statistics, view = TensorStatistics(), reader.open_canonical(job[1])
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for _, tile in tiles:
                statistics.add(tile, view.dtype)
                if progress is not None:
                    progress(tile.nbytes)
        return [getattr(statistics, name) for name in _FIELDS]

    results = run_scan(
        scan,
        jobs,
        work,
        name=lambda job: repr((job[0], job[1].base, job[1].shape)),
        size=lambda job: numel(job[1].shape) * reader.catalogue[job[0]].dtype.itemsize,
        threads=threads,
    )
    for (name, _), values in zip(jobs, results, strict=True):
        if values is not None:
            out[name].merge(TensorStatistics(*values))
    return out


_FIELDS = ("count", "zeros", "nan", "inf", "min", "max", "mean", "_m2")
