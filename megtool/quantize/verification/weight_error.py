"""Compare quantized weights with their source, tile by tile, with a bound for every element.

Rounding to the nearest code leaves every element within half a step of the format, or clipped at
the largest code. A larger error of an unclipped element does not come from rounding: a wrong row,
swapped nibbles, or a scale of another block. This finds damage of a few elements that no mean over
a matrix would show.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.errors import FormatError, MappingError
from megtool.number_formats.decode import COLUMNS, LOW_RANK
from megtool.number_formats.small_floats import single
from megtool.process.threads import run_jobs
from megtool.quantize.verification.step_sizes import LARGEST, StepSizes, map_part
from megtool.tensors.box import strides
from megtool.tensors.catalogue import Catalogue, StoredPart
from megtool.tensors.placement import Placement, narrow, refine
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.shard_locator import count_cuttable_dims
from megtool.transport.tile import split_box

Floats = NDArray[np.float32]

TILE_BYTES = 1 << 20
"""Float32 bytes of one side; a thread has about a dozen arrays of this size."""

SLACK = 2.0**-8
"""Additional relative error of elements, for rounding to bfloat16."""

FOLDED_SLACK = 2.0**-6
"""The same if smoothing scales were rounded to bfloat16 too, once with a norm and once in a
file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPair:
    """A weight and its placements in the source and in the written folder. `input_factors` are what
    the written model multiplies each input column by (None: ones; NaN: unknown); columns of the
    source are divided by them, as before rounding."""

    name: str
    source: Placement
    written: Placement
    shape: tuple[int, int]
    input_factors: Floats | None = None


@dataclass(slots=True, kw_only=True)
class ErrorSums:
    """Sums over the elements of a weight.

    `num_bounded` elements were compared with half a step; `num_wrong` of them exceed it, the first
    at `first_wrong` (row, column), and `num_clipped` exceed it only because they are beyond the
    largest code. `worst_row` has the largest relative error. `lost_row` is the worst of the rows
    whose error is more than twice that of rounding, if that is known. `largest` is the amax of the
    source after smoothing.
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

    def merge(self, part: ErrorSums) -> None:
        """Add the sums of another part."""
        for name in ("count", "num_nan", "source", "written", "product", "error"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for name in ("num_bounded", "num_wrong", "num_clipped"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.max_error = max(self.max_error, part.max_error)
        self.largest = max(self.largest, part.largest)
        if part.first_wrong is not None:
            first = self.first_wrong
            self.first_wrong = part.first_wrong if first is None else min(first, part.first_wrong)
        worst = (self.worst_row_error, -self.worst_row)
        if (part.worst_row_error, -part.worst_row) > worst and part.worst_row >= 0:
            self.worst_row, self.worst_row_error = part.worst_row, part.worst_row_error
        worst = (self.lost_row_error, -self.lost_row)
        if (part.lost_row_error, -part.lost_row) > worst and part.lost_row >= 0:
            self.lost_row, self.lost_row_error = part.lost_row, part.lost_row_error

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite without noise."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.source / self.error) if self.source else -math.inf

    @property
    def cosine(self) -> float:
        """The cosine similarity; 1 for two zero weights."""
        size = math.sqrt(self.source) * math.sqrt(self.written)
        return self.product / size if size else float(self.source == self.written)

    @property
    def relative_error(self) -> float:
        """The norm of the difference over that of the source."""
        if not self.error:
            return 0.0
        return math.sqrt(self.error / self.source) if self.source else math.inf


def decode_as_float32(catalogue: Catalogue) -> Catalogue:
    """The catalogue with packed tensors decoded to float32 instead of their original dtype."""
    wide = dtype("float32")
    tensors = [t if t.packing is None else replace(t, dtype=wide) for t in catalogue.tensors]
    return replace(catalogue, tensors=tensors, _index={})


def split_pre_quant_scales(catalogue: Catalogue) -> tuple[Catalogue, dict[str, Floats]]:
    """Separate `pre_quant_scale` from the weights of a catalogue.

    Returns the catalogue with weights as they were rounded, and the factors by stored name.
    """
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
    """Read all weights once on both sides and sum up their errors, by name.

    `written` reads entire tensors. `progress` receives numbers of elements, from any thread.
    """
    out = {w.name: ErrorSums() for w in weights}
    lock = threading.Lock()
    scales = {w.name: StepSizes.of(w.written, w.shape, written.catalogue) for w in weights}
    rounded = {n: _without_branch(parts) for n, parts in written.catalogue.packed.items()}
    has_branch = {
        n for n, parts in rounded.items() if len(parts) < len(written.catalogue.packed[n])
    }
    residuals = CheckpointReader(
        replace(written.catalogue, packed=rounded), written.files, is_strict=False
    )

    def work(part: WeightPart) -> None:
        residual = residuals if part.written.stored in has_branch else None
        sums = _measure_part(part, source, written, scales[part.weight.name], residual)
        with lock:
            out[part.weight.name].merge(sums)
        progress(sums.count + sums.num_nan)

    with residuals:
        run_jobs(
            [job for w in weights for job in split_weight(w, source, written)],
            work,
            threads=threads,
        )
    return out


def _without_branch(parts: tuple[StoredPart, ...]) -> tuple[StoredPart, ...]:
    """The parts that are rounded, without SVDQuant's matrices."""
    return tuple(p for p in parts if p.part.role not in LOW_RANK)


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
    """Split a weight into the parts in which it is read, of whole rows if possible."""
    try:
        p, q = refine(w.source, w.written)
    except MappingError:  # the two cannot be split in the same way
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
    part: WeightPart,
    source: CheckpointReader,
    written: CheckpointReader,
    steps: StepSizes | None,
    residual: CheckpointReader | None,
) -> ErrorSums:
    """The sums of a part; `residual` reads what is left of the weight by SVDQuant's matrices, whose
    elements bound the error of rounding."""
    u, v = source.open_canonical(part.source), written.open_canonical(part.written)
    x = numeric_values(u.read().reshape(-1), u.dtype).astype(np.float32, copy=False)
    y = numeric_values(v.read().reshape(-1), v.dtype).astype(np.float32, copy=False)
    columns = part.weight.shape[1]
    has_whole_rows = part.start % columns == 0 and x.size % columns == 0
    if (factors := part.weight.input_factors) is not None:
        column = np.arange(part.start, part.start + x.size) % columns
        element_factors = factors[column]
        is_unknown = np.isnan(element_factors)  # the input of these columns is zero
        with np.errstate(all="ignore"):
            x, y = (
                np.where(is_unknown, np.float32(0), x / element_factors),
                np.where(is_unknown, np.float32(0), y),
            )
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
    if residual is not None:
        view = residual.open_canonical(part.written)
        size = np.abs(x - (y - numeric_values(view.read().reshape(-1), view.dtype)))
        size = size.reshape(-1, columns)
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
    """Record the row with the largest error; returns the relative error of each row."""
    square = np.einsum("ij,ij->i", size, size)
    error = np.einsum("ij,ij->i", gap, gap)
    ratio = np.sqrt(np.divide(error, square, out=np.zeros_like(error), where=square > 0))
    if ratio.size:
        worst = int(ratio.argmax())
        out.worst_row, out.worst_row_error = first + worst, float(ratio[worst])
    return np.asarray(ratio, np.float32)


_SUSPECT = 0.05
"""Rows with a smaller relative error are not compared with the error of rounding."""

_BEYOND = 2.0
"""Chosen (GPTQ) or clipped codes have larger errors than the nearest ones, but less than this many
half steps per row; a row of zeros or a wrong row has five or more."""


def _add_lost_row(
    out: ErrorSums, kind: str, size: Floats, gap: Floats, step: Floats, ratio: Floats, first: int
) -> None:
    """Record the worst of the rows whose error rounding does not explain.

    A row of small numbers under the scale of an entire matrix may round to zeros, so a relative
    error of 1 can come from the format.
    """
    rows = np.flatnonzero(ratio > _SUSPECT)
    if not rows.size:
        return
    size, gap = size[rows], gap[rows]
    step = np.broadcast_to(step, (len(ratio), step.shape[1]))[rows]
    steps = half_step(kind, size, np.broadcast_to(step, size.shape))
    expected = np.einsum("ij,ij->i", steps, steps)
    error = np.einsum("ij,ij->i", gap, gap)
    lost = np.where(error > np.float32(_BEYOND**2) * expected, ratio[rows], np.float32(0))
    worst = int(lost.argmax())
    if lost[worst] > 0:
        out.lost_row, out.lost_row_error = first + int(rows[worst]), float(lost[worst])


def _count_beyond_rounding(
    out: ErrorSums, kind: str, size: Floats, gap: Floats, step: Floats, slack: float, first: int
) -> None:
    """Count the elements whose error exceeds that of rounding."""
    rows, columns = size.shape
    out.num_bounded = size.size
    if kind in ("fp8", "mxfp8"):  # a cheap bound that few elements exceed; only these are compared
        bound = size * np.float32(2.0**-4 + slack)
    else:
        bound = step * np.float32(0.25 if kind in ("mxfp4", "nvfp4") else 0.5)
    suspects = np.flatnonzero(~(gap <= bound))
    size, gap = size.reshape(-1)[suspects], gap.reshape(-1)[suspects]
    step = np.broadcast_to(step, (rows, columns))[np.divmod(suspects, columns)]
    exceeds = ~(gap <= half_step(kind, size, step) + np.float32(slack) * size)
    if not exceeds.any():
        return
    clipped = exceeds & (size > np.float32(LARGEST[kind]) * step)
    wrong = exceeds & ~clipped
    out.num_clipped = int(clipped.sum())
    out.num_wrong = int(wrong.sum())
    if out.num_wrong:
        row, column = divmod(int(suspects[wrong.argmax()]), columns)
        out.first_wrong = (first + row, column)


def half_step(kind: str, size: Floats, step: Floats) -> Floats:
    """Half the distance between two numbers of a format around `size`, or a little more.

    Steps of FP4 are 0.5, 1 from 2 on, and 2 from 4 on; of FP8 (E4M3) an eighth of the power of two
    below, at least 2^-9; INT4 and INT8 are uniform.
    """
    if kind in ("mxfp4", "nvfp4"):
        out = np.where(size < 2 * step, np.float32(0.25), np.float32(0.5))
        out = np.where(size < 4 * step, out, np.float32(1)) * step
    elif kind in ("fp8", "mxfp8"):
        out = np.maximum(size * np.float32(2.0**-4), step * np.float32(2.0**-10))
    else:
        out = step * np.float32(0.5)
    return np.asarray(out, np.float32)
