"""Compare the tensors of two checkpoints element by element, and digest them on the way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from megtool.digests.crc32c import Digests
from megtool.dtypes import DType
from megtool.errors import FormatError, MappingError
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow, refine
from megtool.transport.cast import numeric_values
from megtool.transport.reading.parallel_scan import TILE_BYTES, split_placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import ScanPart, run_scan
from megtool.transport.shard_locator import count_cuttable_dims
from megtool.transport.strided import Array
from megtool.transport.tile import Index

_CHUNK_ELEMENTS = 1 << 15  # elements compared at once

MAX_SAMPLES = 5
"""Differing elements of a tensor that are listed with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """One tensor and its two placements; if one is None, the other is only digested."""

    name: str
    a: Placement | None
    b: Placement | None


class ReadableView(Protocol):
    """A tensor that is read tile by tile."""

    @property
    def dtype(self) -> DType:
        """The dtype of its elements."""
        ...

    def tiles(self, max_bytes: int) -> Generator[tuple[int, Array], None, None]:
        """Consecutive elements, each tile with the flat index of its first."""
        ...


@dataclass(slots=True, kw_only=True)
class ComparedSource:
    """One checkpoint of a comparison. `sizes` gives the tensors to digest and their bytes.

    `digests` is the result; without `sizes` no digest is computed.
    """

    reader: CheckpointReader
    sizes: Mapping[str, int] = field(default_factory=dict)
    digests: Digests | None = None

    def __post_init__(self) -> None:
        if self.sizes:
            self.digests = Digests(self.sizes)
            for name, num_bytes in self.sizes.items():
                if not num_bytes:  # an empty tensor has no tiles
                    self.digests.add(name, 0, b"")

    def dtype(self, placement: Placement) -> DType:
        """The dtype in which the reader returns a tensor's elements."""
        return self.reader.open_canonical(placement).dtype

    def whole_row_depth(self, placement: Placement) -> int | None:
        """The dimension from which a packed tensor is read whole; None if it may be cut."""
        stored = self.reader.catalogue[placement.stored]
        if stored.packing is None:
            return None
        try:
            return count_cuttable_dims(placement, stored)
        except FormatError:
            return 0

    def open_box(self, placement: Placement, lo: Index, hi: Index) -> ReadableView:
        """Open the box `lo:hi` of a tensor's view."""
        return self.reader.open_canonical(narrow(placement, lo, hi))

    def make_digests(self, name: str) -> Digests | None:
        """Digests for some elements of a tensor, which `add` takes; None if it is not digested."""
        return Digests(self.sizes) if name in self.sizes else None

    def add(self, name: str, part: Sequence[int] | None) -> None:
        """Add the linear CRC and the bytes of some elements of a tensor."""
        if part is not None and self.digests is not None:
            self.digests.add_parts(name, part[0], part[1])

    def tiles(
        self, name: str, view: ReadableView, start: int, digests: Digests | None
    ) -> Generator[tuple[int, Array], None, None]:
        """The tiles of a view that begins at flat index `start` of tensor `name`, digested."""
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for offset, tile in tiles:
                if digests is not None:
                    digests.add(name, (start + offset) * tile.itemsize, tile)
                yield offset, tile


@dataclass(slots=True)
class TensorDelta:
    """The differences between two tensors.

    `largest_abs` and `largest_rel` (relative to b, if b is not 0) are the largest among the
    elements that differ, at flat indices `abs_index` and `rel_index`. A NaN on one side only is
    counted in `num_nan`. `within` is the largest difference inside the tolerance. `samples` are the
    first elements that differ: flat index, the number in a and that in b. Nothing is known of
    elements that are equal: their tiles are skipped.
    """

    num_differing: int = 0
    num_nan: int = 0
    largest_abs: float | None = None
    abs_index: int | None = None
    largest_rel: float | None = None
    rel_index: int | None = None
    first: int | None = None
    within: float = 0.0
    samples: list[list[float]] = field(default_factory=list)

    def merge(self, delta: TensorDelta) -> None:
        """Add the differences of other elements."""
        self.num_differing += delta.num_differing
        self.num_nan += delta.num_nan
        self.within = max(self.within, delta.within)
        self.samples = sorted([*self.samples, *delta.samples], key=lambda s: s[0])[:MAX_SAMPLES]
        if delta.first is not None and (self.first is None or delta.first < self.first):
            self.first = delta.first
        if _exceeds(delta.largest_abs, delta.abs_index, self.largest_abs, self.abs_index):
            self.largest_abs, self.abs_index = delta.largest_abs, delta.abs_index
        if _exceeds(delta.largest_rel, delta.rel_index, self.largest_rel, self.rel_index):
            self.largest_rel, self.rel_index = delta.largest_rel, delta.rel_index


def _exceeds(a: float | None, a_index: int | None, b: float | None, b_index: int | None) -> bool:
    """Whether `a` is larger, or equal and earlier: the result does not depend on threads."""
    if a is None or a_index is None:
        return False
    return b is None or b_index is None or (a, -a_index) > (b, -b_index)


def compare(
    pairs: Sequence[TensorPair],
    a: ComparedSource,
    b: ComparedSource,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> dict[str, TensorDelta]:
    """Read all pairs; returns, by name, those that differ or differ within the tolerance.

    Without a tolerance, elements are equal if their bits and dtypes are. With a tolerance, they are
    equal if `|a - b| <= atol + rtol * |b|` or both are NaN. The tensors of a pair have the same
    number of elements. Memory is bounded by a few tiles per thread. `progress` receives numbers of
    bytes read (of `a`, if it has the tensor), from any thread.
    With `scan`, workers share it out: see `run_scan`.
    """
    deltas: dict[str, TensorDelta] = {}

    def work(job: _Job) -> _JobResult:
        return _compare_job(job, a, b, atol, rtol, progress or (lambda num_bytes: None))

    jobs = [job for pair in pairs for job in _split_pair(pair, a, b)]
    results = run_scan(
        scan,
        jobs,
        work,
        name=lambda job: repr((job.name, job.start, job.a is None, job.b is None)),
        size=lambda job: job.num_bytes(a, b),
        threads=threads,
    )
    for job, result in zip(jobs, results, strict=True):
        if result is None:
            continue
        delta, *parts = result
        if delta is not None:
            deltas.setdefault(job.name, TensorDelta()).merge(TensorDelta(*delta))
        for half, part in zip((a, b), parts, strict=True):
            half.add(job.name, part)
    return deltas


_JobResult = list[Any]
"""The fields of a `TensorDelta`, and of each side the linear CRC and bytes; each may be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The box `lo:hi` of a pair's views, from flat index `start`; without it all of both."""

    name: str
    start: int
    a: Placement | None
    b: Placement | None
    box: tuple[Index, Index] | None = None

    def num_bytes(self, a: ComparedSource, b: ComparedSource) -> int:
        """The bytes that are read, of one side."""
        half, placement = (a, self.a) if self.a is not None else (b, self.b)
        if placement is None:
            return 0
        lo, hi = self.box or ((0,) * len(placement.shape), placement.shape)
        shape = [y - x for x, y in zip(lo, hi, strict=True)]
        return numel(shape) * half.dtype(placement).itemsize

    def open(self, source: ComparedSource, placement: Placement) -> ReadableView:
        """Open one side."""
        lo, hi = self.box or ((0,) * len(placement.shape), placement.shape)
        return source.open_box(placement, lo, hi)


def _split_pair(pair: TensorPair, a: ComparedSource, b: ComparedSource) -> Iterator[_Job]:
    p, q = pair.a, pair.b
    if p is not None and q is not None and numel(p.shape):
        try:
            p, q = refine(p, q)
        except MappingError:  # no common split: one thread reads both whole
            yield _Job(name=pair.name, start=0, a=p, b=q)
            return
    views = [(half, placement) for half, placement in ((a, p), (b, q)) if placement is not None]
    depth: int | None = None
    for half, placement in views:
        rows = half.whole_row_depth(placement)
        if rows is not None:
            depth = rows if depth is None else min(depth, rows)
    cell = max(half.dtype(placement).itemsize for half, placement in views)
    for start, lo, hi in split_placement(views[0][1], cell, depth):
        yield _Job(name=pair.name, start=start, a=p, b=q, box=(lo, hi))


def _compare_job(
    job: _Job,
    a: ComparedSource,
    b: ComparedSource,
    atol: float,
    rtol: float,
    progress: Callable[[int], None],
) -> _JobResult:
    if job.a is None or job.b is None:
        half, placement = (b, job.b) if job.a is None else (a, job.a)
        digests = half.make_digests(job.name)
        if placement is not None:
            view = job.open(half, placement)
            with closing(half.tiles(job.name, view, job.start, digests)) as tiles:
                for _, tile in tiles:
                    progress(tile.nbytes)
        part = _part(digests, job.name)
        return [None, None, part] if job.a is None else [None, part, None]
    u, v = job.open(a, job.a), job.open(b, job.b)
    of_a, of_b = a.make_digests(job.name), b.make_digests(job.name)
    out = TensorDelta()
    with (
        closing(a.tiles(job.name, u, job.start, of_a)) as left,
        closing(b.tiles(job.name, v, job.start, of_b)) as right,
    ):
        for offset, x, y in _zip_tiles(left, right):
            if u.dtype != v.dtype or not _has_equal_bits(x, y):
                for i in range(0, x.size, _CHUNK_ELEMENTS):
                    cut = slice(i, i + _CHUNK_ELEMENTS)
                    start = job.start + offset + i
                    out.merge(_measure_delta(x[cut], y[cut], u.dtype, v.dtype, atol, rtol, start))
            progress(x.nbytes)
    differs = out.num_differing or out.within
    delta = [getattr(out, f.name) for f in fields(out)] if differs else None
    return [delta, _part(of_a, job.name), _part(of_b, job.name)]


def _part(digests: Digests | None, name: str) -> list[int] | None:
    part = None if digests is None else digests.parts().get(name)
    return None if part is None else list(part)


def _zip_tiles(
    left: Generator[tuple[int, Array], None, None], right: Generator[tuple[int, Array], None, None]
) -> Iterator[tuple[int, Array, Array]]:
    """Pair two streams of the same number of elements, tile by tile."""
    offset = 0
    x = y = np.empty(0, np.uint8)
    while True:
        if not x.size:
            _, x = next(left, (0, x))
        if not y.size:
            _, y = next(right, (0, y))
        n = min(x.size, y.size)
        if not n:
            if x.size != y.size:
                raise ValueError("the tensors of a pair have different numbers of elements")
            return
        yield offset, x[:n], y[:n]
        x, y, offset = x[n:], y[n:], offset + n


def _has_equal_bits(x: Array, y: Array) -> bool:
    width = 8 if x.nbytes % 8 == 0 else x.itemsize
    return bool((x.view(f"<u{width}") == y.view(f"<u{width}")).all())


def _measure_delta(
    x: Array, y: Array, x_dtype: DType, y_dtype: DType, atol: float, rtol: float, start: int
) -> TensorDelta:
    out = TensorDelta()
    if x_dtype == y_dtype:
        indices = np.flatnonzero(x.view(f"<u{x.itemsize}") != y.view(f"<u{y.itemsize}"))
        x, y = x[indices], y[indices]
    else:
        indices = np.arange(x.size)
    if not indices.size:
        return out
    distance, size, u, v = _distance(x, y, x_dtype, y_dtype)
    if atol or rtol:
        with np.errstate(all="ignore"):
            is_near = (distance <= atol + rtol * size) & np.isfinite(u) & np.isfinite(v)
            is_close = is_near | (u == v) | (np.isnan(u) & np.isnan(v))
        out.within = float(np.max(distance, initial=0.0, where=is_close & np.isfinite(distance)))
        indices, distance, size = indices[~is_close], distance[~is_close], size[~is_close]
        u, v = u[~is_close], v[~is_close]
        if not indices.size:
            return out
    out.num_differing, out.first = len(indices), start + int(indices[0])
    if u.dtype.kind != "c" and v.dtype.kind != "c":
        rows = zip(indices[:MAX_SAMPLES], u[:MAX_SAMPLES], v[:MAX_SAMPLES], strict=True)
        out.samples = [[float(start + i), float(a), float(b)] for i, a, b in rows]
    nan = np.isnan(distance)
    out.num_nan = int(nan.sum())
    indices, distance, size = indices[~nan], distance[~nan], size[~nan]
    if indices.size:
        top = int(distance.argmax())
        out.largest_abs, out.abs_index = float(distance[top]), start + int(indices[top])
    ratio = np.flatnonzero((size > 0) & np.isfinite(size))
    if ratio.size:
        with np.errstate(over="ignore"):
            relative = distance[ratio] / size[ratio]
        top = int(relative.argmax())
        out.largest_rel, out.rel_index = float(relative[top]), start + int(indices[ratio[top]])
    return out


def _distance(
    x: Array, y: Array, x_dtype: DType, y_dtype: DType
) -> tuple[Array, Array, Array, Array]:
    """`|x - y|`, `|y|`, and both as numbers. The first is NaN if one is NaN, and 0 if both are."""
    u, v = numeric_values(x, x_dtype), numeric_values(y, y_dtype)
    if x_dtype == y_dtype and u.dtype.kind in "iu":  # 64-bit integers are not exact as float64
        big = f"<{u.dtype.kind}8"
        i, j = u.astype(big), v.astype(big)
        return np.where(i > j, i - j, j - i).view("<u8").astype(float), np.abs(v * 1.0), u, v
    wide = np.complex128 if "c" in (u.dtype.kind, v.dtype.kind) else np.float64
    u, v = u.astype(wide), v.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(u - v)
    distance[(u == v) | (np.isnan(u) & np.isnan(v))] = 0.0
    return distance, np.abs(v), u, v


def count_pair_bytes(pair: TensorPair, a: ComparedSource, b: ComparedSource) -> int:
    """The bytes of a pair that `compare` reports to `progress`."""
    half, placement = (a, pair.a) if pair.a is not None else (b, pair.b)
    return 0 if placement is None else numel(placement.shape) * half.dtype(placement).itemsize
