"""Expand the scales of source weights to the scales of slices of a target weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError
from megtool.export.quantized_module import QuantizedModule
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A box `rows` x `columns` of a module's weight, put at (row, column) `at` of a target's."""

    module: QuantizedModule
    rows: tuple[int, int]
    columns: tuple[int, int]
    offset: tuple[int, int] = (0, 0)

    @classmethod
    def of_module(cls, module: QuantizedModule, offset: tuple[int, int] = (0, 0)) -> WeightSlice:
        """All of a weight."""
        return cls(module, (0, module.shape[0]), (0, module.shape[1]), offset)

    @property
    def lo(self) -> tuple[int, int]:
        """Where it begins in its module's weight."""
        return self.rows[0], self.columns[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def end(self) -> tuple[int, int]:
        """Where it ends in the target's weight."""
        return self.offset[0] + self.shape[0], self.offset[1] + self.shape[1]


def span_size(part: PackedPart, dim: int) -> int:
    """Rows (0) or columns (1) that an index of a part serves; 0 where it has them all in one."""
    return next((s.per for s in part.spans if s.dim == dim), 0)


def part_index(part: PackedPart, lo: Index, hi: Index) -> tuple[Any, ...]:
    """What indexes the window of the box `lo:hi` in a whole part, as a view also where that has no
    dimension."""
    first, end = part.window(lo, hi)
    return (*(slice(a, b) for a, b in zip(first, end, strict=True)), ...)


def check_codes(box: WeightSlice, part: PackedPart, shape: tuple[int, int]) -> None:
    """A box fills whole bytes and words of a target weight of `shape`.

    Raises:
        UsageError: it does not.
    """
    for dim, name in enumerate(_DIMS):
        per = span_size(part, dim)
        if box.offset[dim] % per or (box.end[dim] % per and box.end[dim] != shape[dim]):
            raise UsageError(
                f"{name} {box.offset[dim]} to {box.end[dim]} of a weight are of "
                f"{box.module.name}, and {per} {name} are stored in one {part.dtype}",
                hint="cut it otherwise (another tensor-parallel size), or keep it unquantized",
            )


def check_scales(
    box: WeightSlice, source: PackedPart, part: PackedPart, shape: tuple[int, int]
) -> None:
    """A box fills whole scales of a target weight, and a source scale serves all under each.

    Raises:
        UsageError: it does not.
    """
    if fault := find_scale_error(box, source, part, shape):
        raise fault


def find_scale_error(
    box: WeightSlice, source: PackedPart, part: PackedPart, shape: tuple[int, int]
) -> UsageError | None:
    """What `check_scales` raises."""
    for dim, name in enumerate(_DIMS):
        begin, n = box.lo[dim], box.shape[dim]
        have, want = span_size(source, dim), span_size(part, dim)
        if not have or begin // have == (begin + n - 1) // have:
            have = 0  # one serves the whole box
        if want:
            ends = box.end[dim] % want == 0 or box.end[dim] == shape[dim]
            if box.offset[dim] % want or not ends:
                return _slice_error(box, dim, f"{want} {name} have one scale")
            if have and (have % want or begin % want):
                return _slice_error(
                    box, dim, f"scales are for {have} {name}, and are to be for {want}"
                )
        elif have:
            return _slice_error(box, dim, f"scales are for {have} {name}, and are to be for all")
    return None


_DIMS = ("rows", "columns")


def _slice_error(box: WeightSlice, dim: int, reason: str) -> UsageError:
    first, n = box.lo[dim], box.shape[dim]
    return UsageError(
        f"{_DIMS[dim]} {first} to {first + n} of {box.module.name} cannot be taken as they are "
        f"stored: {reason}",
        hint="cut it otherwise (another tensor-parallel size), or export it with --to hf",
    )


def expand_scales(
    window: NDArray[Any],
    source: PackedPart,
    lo: tuple[int, int],
    part: PackedPart,
    offset: tuple[int, int],
    shape: tuple[int, int],
) -> NDArray[Any]:
    """The window of a target's scales for the box of `shape` at `at`, out of the window of a
    source's scales for the box that begins at `lo`. Elements are taken, not changed.

    It is taken for granted that `check_scales` found nothing.
    """
    hi = tuple(a + n for a, n in zip(lo, shape, strict=True))
    end = tuple(a + n for a, n in zip(offset, shape, strict=True))
    first = {s.dim: i for s, i in zip(source.spans, source.window(lo, hi)[0], strict=True)}
    counts = {s.dim: n for s, n in zip(source.spans, window.shape, strict=True) if s.dim != WHOLE}
    grid = window.reshape(counts.get(0, 1), counts.get(1, 1))
    for dim in (0, 1):
        want, have = span_size(part, dim), span_size(source, dim)
        count = 1
        if want:
            count = -(-end[dim] // want) - offset[dim] // want
        begins = np.maximum(
            (np.arange(count) + (offset[dim] // want if want else 0)) * want, offset[dim]
        )
        index = np.zeros(count, np.intp)
        if have:
            index = (begins - offset[dim] + lo[dim]) // have - first[dim]
        grid = np.take(grid, index, axis=dim)
    low, high = part.window(offset, end)
    return np.ascontiguousarray(grid).reshape([b - a for a, b in zip(low, high, strict=True)])
