"""Weights whose rows are interleaved in one stored tensor, packed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError
from megtool.quant.packed_tensors.pack import WeightToPack
from megtool.quant.qparams import WeightQParams
from megtool.tensors.placement import Placement
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.strided import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedWeights(WeightToPack):
    """Weights whose rows alternate: `runs[0]` rows of the first, `runs[1]` of the second, and so
    on, repeatedly. `placement` and `dtype` are those of the first."""

    parts: tuple[WeightToPack, ...]
    runs: tuple[int, ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The placements of all weights."""
        return tuple(p.placement for p in self.parts)

    @property
    def period(self) -> int:
        """The number of rows after which the order of weights repeats."""
        return sum(self.runs)

    @contextmanager
    def open_rows(self, reader: RegionReader) -> Iterator[Callable[[int, int], Array]]:
        """See `WeightToPack`; ranges are multiples of `period`."""
        width, period = self.shape[1], self.period

        def read(first: int, end: int) -> Array:
            a, b = first // width // period, end // width // period
            out = np.empty((b - a, period, width), self.dtype.view)
            offset = 0
            for part, run in zip(self.parts, self.runs, strict=True):
                with reader.open(part.placement, part.dtype) as part_rows:
                    block = part_rows.read(a * run * width, b * run * width)
                    out[:, offset : offset + run] = block.reshape(b - a, run, width)
                offset += run
            return out.reshape(-1)

        yield read


def interleave(parts: Sequence[WeightToPack], runs: Sequence[int]) -> InterleavedWeights:
    """Join interleaved weights into one, with their parameters row by row.

    Raises:
        CalibrationError: only some of the weights have calibrated scales or codes.
    """
    first = parts[0]
    all_qparams = [p.qparams for p in parts]
    rows = sum(p.shape[0] for p in parts)
    qparams = replace(
        first.qparams,
        amax=_interleave_rows(all_qparams, "amax", [t.amax for t in all_qparams], parts, runs),
        codes=_interleave_rows(all_qparams, "codes", [t.codes for t in all_qparams], parts, runs),
        global_amax=max(t.global_amax for t in all_qparams),
    )
    return InterleavedWeights(
        placement=replace(first.placement, canonical=""),  # an error may be in any of them
        shape=(rows, first.shape[1]),
        dtype=first.dtype,
        qparams=qparams,
        parts=tuple(parts),
        runs=tuple(runs),
    )


def _interleave_rows(
    all_qparams: Sequence[WeightQParams],
    label: str,
    values: Sequence[NDArray[Any] | None],
    parts: Sequence[WeightToPack],
    runs: Sequence[int],
) -> NDArray[Any] | None:
    """Interleave values per row (or per block of rows) like the stored rows."""
    present = [v for v in values if v is not None]
    if not present:
        return None
    if len(present) < len(values):
        raise CalibrationError(
            f"it has calibrated {label}, but a weight stored in the same tensor has none",
            tensor=next(
                t.module for t, v in zip(all_qparams, values, strict=True) if v is not None
            ),
        )
    turns = []
    for value, part, run in zip(present, parts, runs, strict=True):
        count = part.shape[0] // run
        turns.append(value.reshape(count, value.shape[0] // count, *value.shape[1:]))
    joined = np.concatenate(turns, axis=1)
    return joined.reshape(-1, *joined.shape[2:])
