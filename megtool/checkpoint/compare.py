"""Compare: the tensors of two checkpoints element by element, digesting them on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from megtool.checkpoint.digest import Digests
from megtool.checkpoint.parallel_scan import TILE_BYTES, each, parts
from megtool.checkpoint.read import Reader, TensorView
from megtool.checkpoint.transport.cast import numbers
from megtool.checkpoint.transport.shard_locator import cut_dims
from megtool.checkpoint.transport.strided import Array
from megtool.dtypes import DType
from megtool.errors import FormatError, MappingError
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement, narrow, refine

_AT_A_TIME = 1 << 15  # elements whose difference is computed together


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One tensor by its two places; where one is None the other is read for its digest alone."""

    name: str
    a: Placement | None
    b: Placement | None


@dataclass(slots=True, kw_only=True)
class Half:
    """One checkpoint of a comparison. Tensors that `sizes` names (with their bytes) are digested.

    `digests` holds the result; without `sizes` no digest is computed.
    """

    reader: Reader
    sizes: Mapping[str, int] = field(default_factory=dict)
    digests: Digests | None = None

    def __post_init__(self) -> None:
        if self.sizes:
            self.digests = Digests(self.sizes)
            for name, num_bytes in self.sizes.items():
                if not num_bytes:  # no bytes of it will ever pass
                    self.digests.add(name, 0, b"")

    def dtype(self, placement: Placement) -> DType:
        """The type in which the reader gives a tensor's elements."""
        return self.reader.canonical(placement).dtype

    def tiles(
        self, name: str, view: TensorView, start: int
    ) -> Generator[tuple[int, Array], None, None]:
        """The tiles of a view that begins at flat index `start` of tensor `name`."""
        digests = self.digests if name in self.sizes else None
        with closing(view.tiles(TILE_BYTES)) as tiles:
            for at, tile in tiles:
                if digests is not None:
                    digests.add(name, (start + at) * tile.itemsize, tile)
                yield at, tile


@dataclass(slots=True)
class Delta:
    """How two tensors differ.

    `largest_abs` and `largest_rel` (relative to b, where that is not 0) are the largest among the
    elements that differ, at flat indices `abs_at` and `rel_at`; a NaN that has no partner is only
    counted, in `num_nan`. `within` is the largest difference that the tolerance let pass.
    """

    num_differing: int = 0
    num_nan: int = 0
    largest_abs: float | None = None
    abs_at: int | None = None
    largest_rel: float | None = None
    rel_at: int | None = None
    first: int | None = None
    within: float = 0.0

    def merge(self, other: Delta) -> None:
        """Take in the differences of other elements."""
        self.num_differing += other.num_differing
        self.num_nan += other.num_nan
        self.within = max(self.within, other.within)
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first = other.first
        if _exceeds(other.largest_abs, other.abs_at, self.largest_abs, self.abs_at):
            self.largest_abs, self.abs_at = other.largest_abs, other.abs_at
        if _exceeds(other.largest_rel, other.rel_at, self.largest_rel, self.rel_at):
            self.largest_rel, self.rel_at = other.largest_rel, other.rel_at


def _exceeds(a: float | None, a_at: int | None, b: float | None, b_at: int | None) -> bool:
    """Whether `a` is the larger, or as large and earlier: so that threads do not matter."""
    if a is None or a_at is None:
        return False
    return b is None or b_at is None or (a, -a_at) > (b, -b_at)


def compare(
    pairs: Sequence[Pair],
    a: Half,
    b: Half,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Delta]:
    """Read all pairs, and say by name which differ, or differ within the tolerance.

    Without a tolerance elements are equal if their bits are; the two types must be the same. With
    one they are equal if `|a - b| <= atol + rtol * |b|`, or both are NaN. The two tensors of a pair
    have as many elements. Memory is bounded by a few tiles a thread. `progress` is told of bytes of
    a tensor (that of `a`, if there is one), from any thread.
    """
    found: dict[str, Delta] = {}
    lock = threading.Lock()

    def work(job: _Job) -> None:
        delta = _read(job, a, b, atol, rtol, progress or (lambda num_bytes: None))
        if delta is not None:
            with lock:
                found.setdefault(job.name, Delta()).merge(delta)

    jobs = [job for pair in pairs for job in _jobs(pair, a, b)]
    each(jobs, work, threads=threads)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A part of a pair, from flat index `start`."""

    name: str
    start: int
    a: Placement | None
    b: Placement | None


def _jobs(pair: Pair, a: Half, b: Half) -> Iterator[_Job]:
    p, q = pair.a, pair.b
    if p is not None and q is not None and numel(p.shape):
        try:
            p, q = refine(p, q)
        except MappingError:  # they cannot be cut alike: one thread reads both whole
            yield _Job(name=pair.name, start=0, a=p, b=q)
            return
    views = [(half, place) for half, place in ((a, p), (b, q)) if place is not None]
    depth: int | None = None
    for half, place in views:
        stored = half.reader.catalogue[place.stored]
        if stored.packing is not None:
            try:
                rows = cut_dims(place, stored)
            except FormatError:
                rows = 0
            depth = rows if depth is None else min(depth, rows)
    cell = max(half.dtype(place).itemsize for half, place in views)
    for start, lo, hi in parts(views[0][1], cell, depth):
        yield _Job(
            name=pair.name,
            start=start,
            a=None if p is None else narrow(p, lo, hi),
            b=None if q is None else narrow(q, lo, hi),
        )


def _read(
    job: _Job, a: Half, b: Half, atol: float, rtol: float, progress: Callable[[int], None]
) -> Delta | None:
    if job.a is None or job.b is None:
        half, place = (b, job.b) if job.a is None else (a, job.a)
        if place is not None:
            view = half.reader.canonical(place)
            with closing(half.tiles(job.name, view, job.start)) as tiles:
                for _, tile in tiles:
                    progress(tile.nbytes)
        return None
    u, v = a.reader.canonical(job.a), b.reader.canonical(job.b)
    out = Delta()
    with (
        closing(a.tiles(job.name, u, job.start)) as left,
        closing(b.tiles(job.name, v, job.start)) as right,
    ):
        for at, x, y in _side_by_side(left, right):
            if u.dtype != v.dtype or not _same_bits(x, y):
                for i in range(0, x.size, _AT_A_TIME):
                    cut = slice(i, i + _AT_A_TIME)
                    start = job.start + at + i
                    out.merge(_delta(x[cut], y[cut], u.dtype, v.dtype, atol, rtol, start))
            progress(x.nbytes)
    return out if out.num_differing or out.within else None


def _side_by_side(
    left: Generator[tuple[int, Array], None, None], right: Generator[tuple[int, Array], None, None]
) -> Iterator[tuple[int, Array, Array]]:
    """What two streams of as many elements have at the same place, tile by tile."""
    at = 0
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
        yield at, x[:n], y[:n]
        x, y, at = x[n:], y[n:], at + n


def _same_bits(x: Array, y: Array) -> bool:
    width = 8 if x.nbytes % 8 == 0 else x.itemsize
    return bool((x.view(f"<u{width}") == y.view(f"<u{width}")).all())


def _delta(
    x: Array, y: Array, kind: DType, other: DType, atol: float, rtol: float, start: int
) -> Delta:
    out = Delta()
    if kind == other:
        where = np.flatnonzero(x.view(f"<u{x.itemsize}") != y.view(f"<u{y.itemsize}"))
        x, y = x[where], y[where]
    else:
        where = np.arange(x.size)
    if not where.size:
        return out
    apart, size, u, v = _apart(x, y, kind, other)
    if atol or rtol:
        with np.errstate(all="ignore"):
            near = (apart <= atol + rtol * size) & np.isfinite(u) & np.isfinite(v)
            close = near | (u == v) | (np.isnan(u) & np.isnan(v))
        out.within = float(np.max(apart, initial=0.0, where=close & np.isfinite(apart)))
        where, apart, size = where[~close], apart[~close], size[~close]
        if not where.size:
            return out
    out.num_differing, out.first = len(where), start + int(where[0])
    nan = np.isnan(apart)
    out.num_nan = int(nan.sum())
    where, apart, size = where[~nan], apart[~nan], size[~nan]
    if where.size:
        top = int(apart.argmax())
        out.largest_abs, out.abs_at = float(apart[top]), start + int(where[top])
    ratio = np.flatnonzero((size > 0) & np.isfinite(size))
    if ratio.size:
        with np.errstate(over="ignore"):
            relative = apart[ratio] / size[ratio]
        top = int(relative.argmax())
        out.largest_rel, out.rel_at = float(relative[top]), start + int(where[ratio[top]])
    return out


def _apart(x: Array, y: Array, kind: DType, other: DType) -> tuple[Array, Array, Array, Array]:
    """`|x - y|`, `|y|`, and the two as numbers; the first is NaN where one of them is, and 0 where
    both are."""
    u, v = numbers(x, kind), numbers(y, other)
    if kind == other and u.dtype.kind in "iu":  # 64-bit integers are not exact as float64
        big = f"<{u.dtype.kind}8"
        i, j = u.astype(big), v.astype(big)
        return np.where(i > j, i - j, j - i).view("<u8").astype(float), np.abs(v * 1.0), u, v
    wide = np.complex128 if "c" in (u.dtype.kind, v.dtype.kind) else np.float64
    u, v = u.astype(wide), v.astype(wide)
    with np.errstate(all="ignore"):
        apart = np.abs(u - v)
    apart[(u == v) | (np.isnan(u) & np.isnan(v))] = 0.0
    return apart, np.abs(v), u, v


def num_bytes(pair: Pair, a: Half, b: Half) -> int:
    """What `compare` will tell `progress` of a pair."""
    half, place = (a, pair.a) if pair.a is not None else (b, pair.b)
    return 0 if place is None else numel(place.shape) * half.dtype(place).itemsize
