"""Statistics: smallest, largest, mean and spread of tensors, and how many zeros, NaN and Inf."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.checkpoint.parallel_scan import TILE_BYTES, each, parts, whole_rows
from megtool.checkpoint.read import Reader
from megtool.checkpoint.transport.cast import numbers
from megtool.checkpoint.transport.strided import Array
from megtool.dtypes import DType
from megtool.tensors.placement import Placement, narrow

_AT_A_TIME = 1 << 16  # elements; as float64 they stay in the second cache


@dataclass(slots=True)
class Statistics:
    """What the numbers of one tensor are like.

    `min`, `max`, `mean` and `std` (of the population, summed in float64) are those of the finite
    elements, None where there are none. A complex number counts as two.
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
        """Take in some elements, as they lie in a file."""
        for start in range(0, array.size, _AT_A_TIME):
            self.merge(_of(array[start : start + _AT_A_TIME], kind))

    def merge(self, other: Statistics) -> None:
        """Take in what is known of other elements."""
        here = self.count - self.nan - self.inf
        there = other.count - other.nan - other.inf
        self.count += other.count
        self.zeros += other.zeros
        self.nan += other.nan
        self.inf += other.inf
        if not there or other.mean is None or other.min is None or other.max is None:
            return
        if self.mean is None or self.min is None or self.max is None:
            self.min, self.max, self.mean, self._m2 = other.min, other.max, other.mean, other._m2
            return
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        apart, share = other.mean - self.mean, there / (here + there)
        self.mean += apart * share
        self._m2 += other._m2 + apart * apart * share * here

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        names = ("min", "max", "mean", "std", "zeros", "nan", "inf")
        return {name: getattr(self, name) for name in names}


def _of(array: Array, kind: DType) -> Statistics:
    x = numbers(array, kind)
    if kind.name == "complex64":
        x = x.view("<f4")
    if kind.name == "bool":
        x = x.view(np.uint8)
    out = Statistics(count=x.size, zeros=x.size - int(np.count_nonzero(x)))
    if x.dtype.kind == "f":
        finite = np.isfinite(x)
        if not finite.all():
            out.nan = int(np.isnan(x).sum())
            x = x[finite]
            out.inf = out.count - out.nan - x.size
    if not x.size:
        return out
    out.min, out.max = x.min().item(), x.max().item()
    with np.errstate(over="ignore", invalid="ignore"):  # float64 numbers may have no finite square
        y = x.astype(np.float64)
        out.mean = float(y.mean())
        y -= out.mean
        out._m2 = float(np.square(y, out=y).sum())
    return out


def measure(
    reader: Reader,
    names: Sequence[str],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Statistics]:
    """Statistics of stored tensors, all elements of which are read once.

    `progress` is told of bytes, from any thread.
    """
    out = {name: Statistics() for name in names}
    jobs: list[tuple[str, Placement]] = []
    for name in names:
        stored = reader.catalogue[name]
        whole = Placement.identity(name, stored.shape)
        cuts = parts(whole, stored.dtype.itemsize, whole_rows(whole, stored))
        jobs += [(name, narrow(whole, lo, hi)) for _, lo, hi in cuts]
    lock = threading.Lock()

    def work(job: tuple[str, Placement]) -> None:
        name, placement = job
        found, view = Statistics(), reader.canonical(placement)
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for _, tile in tiles:
                found.add(tile, view.dtype)
                if progress is not None:
                    progress(tile.nbytes)
        with lock:
            out[name].merge(found)

    each(jobs, work, threads=threads)
    return out
