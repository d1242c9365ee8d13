"""Count NaN and Inf in stored tensors: every element is read once, as fast as the disk gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from megtool.dtypes import DType
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow
from megtool.transport.cast import numeric_values
from megtool.transport.reading.parallel_scan import TILE_BYTES, packed_row_depth, split_placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import ScanPart, run_scan
from megtool.transport.strided import Array

_BFLOAT16_EXPONENT, _BFLOAT16_FRACTION = 0x7F80, 0x007F


@dataclass(slots=True)
class NonFinite:
    """The elements of a tensor that are NaN or Inf."""

    nan: int = 0
    inf: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf)


def count_nonfinite(
    reader: CheckpointReader,
    names: Sequence[str],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> dict[str, NonFinite]:
    """Read stored tensors whole, and count NaN and Inf in each.

    Quantized tensors are read as the numbers that they stand for. `progress` receives numbers of
    bytes, from any thread. With `scan`, workers share the reading out.

    Raises:
        FormatError: a shard is missing, or packed data is damaged.
        StorageError: a read failed.
    """
    jobs: list[tuple[str, Placement]] = []
    for name in names:
        stored = reader.catalogue[name]
        whole = Placement.identity(name, stored.shape)
        cuts = split_placement(whole, stored.dtype.itemsize, packed_row_depth(whole, stored))
        jobs += [(name, narrow(whole, lo, hi)) for _, lo, hi in cuts]

    def work(job: tuple[str, Placement]) -> list[int]:
        out = NonFinite()
        view = reader.open_canonical(job[1])
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for _, tile in tiles:
                count = _count(tile, view.dtype)
                out.nan += count.nan
                out.inf += count.inf
                if progress is not None:
                    progress(tile.nbytes)
        return [out.nan, out.inf]

    results = run_scan(
        scan,
        jobs,
        work,
        name=lambda job: repr((job[0], job[1].base, job[1].shape)),
        size=lambda job: numel(job[1].shape) * reader.catalogue[job[0]].dtype.itemsize,
        threads=threads,
    )
    out = {name: NonFinite() for name in names}
    for (name, _), counts in zip(jobs, results, strict=True):
        if counts is not None:
            out[name].nan += counts[0]
            out[name].inf += counts[1]
    return out


def _count(array: Array, kind: DType) -> NonFinite:
    if kind.name == "bfloat16":  # bits alone: a conversion would take twice the memory
        exponent = array & _BFLOAT16_EXPONENT
        is_special = exponent == _BFLOAT16_EXPONENT
        special = int(np.count_nonzero(is_special))
        if not special:
            return NonFinite()
        inf = int(np.count_nonzero((array[is_special] & _BFLOAT16_FRACTION) == 0))
        return NonFinite(nan=special - inf, inf=inf)
    x = numeric_values(array, kind)
    if x.dtype.kind not in "fc":
        return NonFinite()
    special = x.size - int(np.count_nonzero(np.isfinite(x)))
    if not special:
        return NonFinite()
    nan = int(np.count_nonzero(np.isnan(x)))
    return NonFinite(nan=nan, inf=special - nan)
