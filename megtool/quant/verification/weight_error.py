"""Compare quantized weights with their source, tile by tile, with a bound for every element.

Nearest rounding leaves every element within half a step of the format at its size, or cut off at
the largest code. So an element that is off by more, and not because it was cut off, was put there
by something else than rounding: another row, swapped nibbles, a scale of another block. This sees
damage of a few elements that no mean over a matrix would show.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.parallel_scan import run_jobs
from megtool.checkpoint.read import CheckpointReader
from megtool.checkpoint.transport.cast import numeric_values
from megtool.checkpoint.transport.shard_locator import count_cuttable_dims
from megtool.checkpoint.transport.tile import split_box
from megtool.dtypes import dtype
from megtool.errors import FormatError, MappingError
from megtool.number_formats.decode import COLUMNS
from megtool.number_formats.small_floats import single
from megtool.quant.verification.step_sizes import LARGEST, StepSizes, map_part
from megtool.tensors.box import strides
from megtool.tensors.placement import Placement, narrow, refine

Floats = NDArray[np.float32]

TILE_BYTES = 1 << 20
"""Of float32 of one side; a thread holds about a dozen arrays of this size."""

SLACK = 2.0**-8
"""What elements may be off besides, of their size: rounded to bfloat16 on the way."""

FOLDED_SLACK = 2.0**-6
"""The same where factors of columns were rounded to bfloat16 too, once with a norm and once more
in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPair:
    """One weight to be proved: where it lies in the source and in what was written. `gammas` are
    what its inputs, column by column, are multiplied by that those of the source are not (None:
    ones; NaN: nothing is known): the source's columns are divided by them, as before rounding."""

    name: str
    source: Placement
    written: Placement
    shape: tuple[int, int]
    input_factors: Floats | None = None


@dataclass(slots=True, kw_only=True)
class ErrorSums:
    """What is added up over a weight.

    `num_bounded` elements were held against half a step; `num_wrong` of them are off by more than
    that, the first at `first_wrong` (row, column), and `num_clipped` are so only because they lie
    beyond the largest code. `worst_row` is the one with the largest error against its size,
    `lost_row` that among rows which are further off than twice what rounding takes them, where that
    is known; `largest` the largest magnitude of the source, its columns as they were rounded.
    """

    count: int = 0
    num_nan: int = 0
    source: float = 0.0
    written: float = 0.0
    product: float = 0.0
    error: float = 0.0
    max_error: float = 0.0
    largest: float = 0.0
    num_bounded: int = 0
    num_wrong: int = 0
    num_clipped: int = 0
    first_wrong: tuple[int, int] | None = None
    worst_row: int = -1
    worst_row_error: float = 0.0
    lost_row: int = -1
    lost_row_error: float = 0.0

    def merge(self, other: ErrorSums) -> None:
        """Take in other elements."""
        for name in ("count", "num_nan", "source", "written", "product", "error"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("num_bounded", "num_wrong", "num_clipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_error = max(self.max_error, other.max_error)
        self.largest = max(self.largest, other.largest)
        if other.first_wrong is not None:
            first = self.first_wrong
            self.first_wrong = other.first_wrong if first is None else min(first, other.first_wrong)
        worst = (self.worst_row_error, -self.worst_row)
        if (other.worst_row_error, -other.worst_row) > worst and other.worst_row >= 0:
            self.worst_row, self.worst_row_error = other.worst_row, other.worst_row_error
        worst = (self.lost_row_error, -self.lost_row)
        if (other.lost_row_error, -other.lost_row) > worst and other.lost_row >= 0:
            self.lost_row, self.lost_row_error = other.lost_row, other.lost_row_error

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise; infinite without noise."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.source / self.error) if self.source else -math.inf

    @property
    def cosine(self) -> float:
        """1 for the same direction; of two zeros as well."""
        size = math.sqrt(self.source) * math.sqrt(self.written)
        return self.product / size if size else float(self.source == self.written)

    @property
    def relative_error(self) -> float:
        """The norm of the difference over that of the source."""
        if not self.error:
            return 0.0
        return math.sqrt(self.error / self.source) if self.source else math.inf


def decode_as_float32(catalogue: Catalogue) -> Catalogue:
    """The catalogue with packed tensors decoded to float32, not rounded to what they had been."""
    wide = dtype("float32")
    tensors = [t if t.packing is None else replace(t, dtype=wide) for t in catalogue.tensors]
    return replace(catalogue, tensors=tensors, _index={})


def split_pre_quant_scales(catalogue: Catalogue) -> tuple[Catalogue, dict[str, Floats]]:
    """The catalogue with matrices as they were rounded, and what engines multiply the columns of
    their inputs by (`pre_quant_scale`), by stored name."""
    factors: dict[str, Floats] = {}
    packed = dict(catalogue.packed)
    for name, parts in catalogue.packed.items():
        shape = catalogue[name].shape
        for stored in parts:
            if stored.part.role == COLUMNS and stored.part.shape == shape[1:] and len(shape) == 2:
                factors[name] = single(np.array(map_part(catalogue, stored)), stored.part.dtype)
        if name in factors:
            packed[name] = tuple(p for p in parts if p.part.role != COLUMNS)
    return replace(catalogue, packed=packed), factors


def measure_errors(
    weights: Sequence[WeightPair],
    source: CheckpointReader,
    written: CheckpointReader,
    *,
    threads: int,
    progress: Callable[[int], None],
) -> dict[str, ErrorSums]:
    """Read all weights once on both sides, and say by name how they differ.

    `written` reads entire tensors. `progress` receives numbers of elements, from any thread.
    """
    out = {w.name: ErrorSums() for w in weights}
    lock = threading.Lock()
    scales = {w.name: StepSizes.of(w.written, w.shape, written.catalogue) for w in weights}

    def work(part: WeightPart) -> None:
        sums = _measure_part(part, source, written, scales[part.weight.name])
        with lock:
            out[part.weight.name].merge(sums)
        progress(sums.count + sums.num_nan)

    run_jobs(
        [job for w in weights for job in split_weight(w, source, written)], work, threads=threads
    )
    return out


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A part of a weight, from flat index `start`."""

    weight: WeightPair
    start: int
    source: Placement
    written: Placement


def split_weight(
    w: WeightPair, source: CheckpointReader, written: CheckpointReader
) -> Iterator[WeightPart]:
    """The parts in which a weight is read: whole rows where it can be."""
    try:
        p, q = refine(w.source, w.written)
    except MappingError:  # they cannot be cut alike
        yield WeightPart(w, 0, w.source, w.written)
        return
    depth: int | None = None
    for reader, place in ((source, p), (written, q)):
        stored = reader.catalogue[place.stored]
        if stored.packing is not None:
            try:
                rows = count_cuttable_dims(place, stored)
            except FormatError:
                rows = 0
            depth = rows if depth is None else min(depth, rows)
    step, zero = strides(p.shape), (0,) * len(p.shape)
    for lo, hi in split_box(zero, p.shape, 4, TILE_BYTES, depth=depth):
        start = sum(i * s for i, s in zip(lo, step, strict=True))
        yield WeightPart(w, start, narrow(p, lo, hi), narrow(q, lo, hi))


def _measure_part(
    part: WeightPart, source: CheckpointReader, written: CheckpointReader, steps: StepSizes | None
) -> ErrorSums:
    u, v = source.open_canonical(part.source), written.open_canonical(part.written)
    x = numeric_values(u.read().reshape(-1), u.dtype).astype(np.float32, copy=False)
    y = numeric_values(v.read().reshape(-1), v.dtype).astype(np.float32, copy=False)
    columns = part.weight.shape[1]
    has_whole_rows = part.start % columns == 0 and x.size % columns == 0
    if (factors := part.weight.input_factors) is not None:
        column = np.arange(part.start, part.start + x.size) % columns
        by = factors[column]
        unread = np.isnan(by)  # columns whose input is zero, so that nothing is known about them
        with np.errstate(all="ignore"):
            x, y = np.where(unread, np.float32(0), x / by), np.where(unread, np.float32(0), y)
    out = ErrorSums()
    is_finite = np.isfinite(x) & np.isfinite(y)
    if not is_finite.all():
        out.num_nan = int(x.size - is_finite.sum())
        x, y = np.where(is_finite, x, np.float32(0)), np.where(is_finite, y, np.float32(0))
    difference = np.abs(x - y)
    out.count = x.size - out.num_nan
    out.source, out.written = float(np.dot(x, x)), float(np.dot(y, y))
    out.product, out.error = float(np.dot(x, y)), float(np.dot(difference, difference))
    out.max_error = float(difference.max(initial=0.0))
    out.largest = float(np.abs(x).max(initial=0.0))
    if not has_whole_rows:
        return out
    first = part.start // columns
    size, gap = np.abs(x).reshape(-1, columns), difference.reshape(-1, columns)
    ratio = _add_worst_row(out, size, gap, first)
    step = None if steps is None else steps.step(first, first + len(size), columns)
    if steps is None or step is None:
        out.lost_row, out.lost_row_error = out.worst_row, out.worst_row_error
    else:
        with np.errstate(all="ignore"):
            step = np.abs(step)
        _add_lost_row(out, steps.kind, size, gap, step, ratio, first)
        slack = SLACK if factors is None else FOLDED_SLACK
        _count_beyond_rounding(out, steps.kind, size, gap, step, slack, first)
    return out


def _add_worst_row(out: ErrorSums, size: Floats, gap: Floats, first: int) -> Floats:
    """The row that is furthest off; of each how far, against its size."""
    square = np.einsum("ij,ij->i", size, size)
    error = np.einsum("ij,ij->i", gap, gap)
    ratio = np.sqrt(np.divide(error, square, out=np.zeros_like(error), where=square > 0))
    if ratio.size:
        worst = int(ratio.argmax())
        out.worst_row, out.worst_row_error = first + worst, float(ratio[worst])
    return np.asarray(ratio, np.float32)


_SUSPECT = 0.05
"""A row that is off by less, against its size, is not looked at for what rounding explains."""

_BEYOND = 2.0
"""Codes that are chosen for outputs (GPTQ), or clipped, are off by more than the nearest ones, yet
by less than so many half steps a row; a row of zeros, or another row, is off by five and more."""


def _add_lost_row(
    out: ErrorSums, kind: str, size: Floats, gap: Floats, step: Floats, ratio: Floats, first: int
) -> None:
    """The row that is furthest off of those that rounding does not explain.

    A row of small numbers under the scale of a whole matrix may round to zeros, and be off by all
    of its size: that is what the format does to it.
    """
    rows = np.flatnonzero(ratio > _SUSPECT)
    if not rows.size:
        return
    size, gap = size[rows], gap[rows]
    step = np.broadcast_to(step, (len(ratio), step.shape[1]))[rows]
    steps = half_step(kind, size, np.broadcast_to(step, size.shape))
    due = np.einsum("ij,ij->i", steps, steps)
    error = np.einsum("ij,ij->i", gap, gap)
    far = np.where(error > np.float32(_BEYOND**2) * due, ratio[rows], np.float32(0))
    worst = int(far.argmax())
    if far[worst] > 0:
        out.lost_row, out.lost_row_error = first + int(rows[worst]), float(far[worst])


def _count_beyond_rounding(
    out: ErrorSums, kind: str, size: Floats, gap: Floats, step: Floats, slack: float, first: int
) -> None:
    """Count the elements that are further off than rounding takes them."""
    rows, columns = size.shape
    out.num_bounded = size.size
    if kind in ("fp8", "mxfp8"):  # what few elements exceed, to look closely at these alone
        least = size * np.float32(2.0**-4 + slack)
    else:
        least = step * np.float32(0.25 if kind in ("mxfp4", "nvfp4") else 0.5)
    suspects = np.flatnonzero(~(gap <= least))
    size, gap = size.reshape(-1)[suspects], gap.reshape(-1)[suspects]
    step = np.broadcast_to(step, (rows, columns))[np.divmod(suspects, columns)]
    off = ~(gap <= half_step(kind, size, step) + np.float32(slack) * size)
    if not off.any():
        return
    clipped = off & (size > np.float32(LARGEST[kind]) * step)
    wrong = off & ~clipped
    out.num_clipped = int(clipped.sum())
    out.num_wrong = int(wrong.sum())
    if out.num_wrong:
        row, column = divmod(int(suspects[wrong.argmax()]), columns)
        out.first_wrong = (first + row, column)


def half_step(kind: str, size: Floats, step: Floats) -> Floats:
    """Half the distance between two numbers of a format around `size`, or a little more.

    Of FP4 numbers lie 0.5, 1 and 2 apart, from 2 and from 4 on; of FP8 (E4M3) an eighth of the
    power of two below, and 2^-9 at the bottom; INT4 and INT8 are even.
    """
    if kind in ("mxfp4", "nvfp4"):
        out = np.where(size < 2 * step, np.float32(0.25), np.float32(0.5))
        out = np.where(size < 4 * step, out, np.float32(1)) * step
    elif kind in ("fp8", "mxfp8"):
        out = np.maximum(size * np.float32(2.0**-4), step * np.float32(2.0**-10))
    else:
        out = step * np.float32(0.5)
    return np.asarray(out, np.float32)
