"""Weights whose rows are interleaved in one stored tensor, packed as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.computed_tensors import RegionReader
from megtool.checkpoint.transport.strided import Array
from megtool.errors import CalibrationError
from megtool.quant.packed_tensors.pack import WeightToPack
from megtool.quant.qparams import WeightQParams
from megtool.tensors.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedWeights(WeightToPack):
    """Weights whose rows alternate: `runs[0]` rows of the first, `runs[1]` of the second, and so
    on, and again from the first. `placement` and `dtype` are those of the first."""

    parts: tuple[WeightToPack, ...]
    runs: tuple[int, ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """All of them."""
        return tuple(p.placement for p in self.parts)

    @property
    def turn(self) -> int:
        """The rows of one turn."""
        return sum(self.runs)

    @contextmanager
    def reading(self, taking: RegionReader) -> Iterator[Callable[[int, int], Array]]:
        """See `Weight`; ranges are of whole turns."""
        width, turn = self.shape[1], self.turn

        def read(first: int, end: int) -> Array:
            a, b = first // width // turn, end // width // turn
            out = np.empty((b - a, turn, width), self.dtype.view)
            offset = 0
            for part, run in zip(self.parts, self.runs, strict=True):
                with taking.open(part.placement, part.dtype) as part_rows:
                    block = part_rows.read(a * run * width, b * run * width)
                    out[:, offset : offset + run] = block.reshape(b - a, run, width)
                offset += run
            return out.reshape(-1)

        yield read


def interleave(parts: Sequence[WeightToPack], runs: Sequence[int]) -> InterleavedWeights:
    """Join interleaved weights into one, with all of their parameters row by row.

    Raises:
        CalibrationError: of some scales or codes are settled, and of others not.
    """
    first = parts[0]
    treatments = [p.treatment for p in parts]
    rows = sum(p.shape[0] for p in parts)
    treatment = replace(
        first.treatment,
        amax=_rows(treatments, "amax", [t.amax for t in treatments], parts, runs),
        codes=_rows(treatments, "codes", [t.codes for t in treatments], parts, runs),
        global_amax=max(t.global_amax for t in treatments),
    )
    return InterleavedWeights(
        placement=replace(first.placement, canonical=""),  # what is wrong may be of any of them
        shape=(rows, first.shape[1]),
        dtype=first.dtype,
        treatment=treatment,
        parts=tuple(parts),
        runs=tuple(runs),
    )


def _rows(
    treatments: Sequence[WeightQParams],
    label: str,
    values: Sequence[NDArray[Any] | None],
    parts: Sequence[WeightToPack],
    runs: Sequence[int],
) -> NDArray[Any] | None:
    """Per-row values (or per block of rows) in the order of the stored rows."""
    present = [v for v in values if v is not None]
    if not present:
        return None
    if len(present) < len(values):
        raise CalibrationError(
            f"its {label} is settled, and that of a weight stored in the same tensor is not",
            tensor=next(t.module for t, v in zip(treatments, values, strict=True) if v is not None),
        )
    turns = []
    for value, part, run in zip(present, parts, runs, strict=True):
        count = part.shape[0] // run
        turns.append(value.reshape(count, value.shape[0] // count, *value.shape[1:]))
    joined = np.concatenate(turns, axis=1)
    return joined.reshape(-1, *joined.shape[2:])
