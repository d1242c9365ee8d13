"""Strided: an n-d block of memory as contiguous runs of a file, read and written in few calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.storage.files import Files

Array = NDArray[Any]

SIEVE_RUN_BYTES = 1024
SIEVE_GAP = 8
"""Runs shorter than this with gaps of at most this many runs are moved together with the gaps."""

ROW_BYTES = 1024
"""Memory that lies in rows of at least this size is moved row by row in one call, uncopied."""

CALL_BYTES = 256 * 1024
"""A run is moved by calls of at most this size: the kernel is slower with larger ones."""

_EDGE = 64  # elements; a transposed square of this edge stays in the first cache


class Buffers:
    """Scratch memory of one thread, by slot; a slot grows to the largest size asked of it."""

    def __init__(self, peak: Peak | None = None) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}
        self._peak = peak

    def take(self, slot: str, num_bytes: int) -> NDArray[np.uint8]:
        """`num_bytes` of uninitialized memory, the same that the slot gave before."""
        held = self._held.get(slot)
        if held is None or held.nbytes < num_bytes:
            if self._peak is not None:
                self._peak.add(num_bytes - (0 if held is None else held.nbytes))
            self._held.pop(slot, None)
            held = self._held[slot] = np.empty(num_bytes, np.uint8)
        return held[:num_bytes]


class Peak:
    """How much memory the buffers of all threads hold together; it never shrinks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count more memory."""
        with self._lock:
            self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """Runs of a file and the memory they fill.

    Run `i` is the bytes at `offsets[i]` and lies in `views[i]`. Where the memory is not contiguous
    in the order of the file, the views lie in scratch memory, and `inner` (scratch) and `outer`
    (the memory itself) are arrays of one shape that correspond. `sieved` runs hold gaps: bytes that
    belong to others, to be read and written back as they are.
    """

    offsets: list[int]
    views: list[memoryview]
    outer: Array | None = None
    inner: Array | None = None
    sieved: bool = False
    assign: Callable[[Array, Array], None] = np.copyto

    def read(self, files: Files, fd: int, shift: int) -> None:
        """Fill the memory from the file, all offsets moved by `shift`."""
        for offset, view in zip(self.offsets, self.views, strict=True):
            files.pread_into(fd, view, offset + shift)
        if self.outer is not None and self.inner is not None:
            self.assign(self.outer, self.inner)

    def write(self, files: Files, fd: int, shift: int) -> None:
        """Write the memory to the file."""
        self._stage(files, fd, shift)
        for offset, view in zip(self.offsets, self.views, strict=True):
            files.pwrite_all(fd, view, offset + shift)

    def repair(self, files: Files, fd: int, shift: int, buffers: Buffers) -> bool:
        """Compare the file with what `write` would write; write what differs, and say so."""
        self._stage(files, fd, shift)
        differs = False
        for offset, view in zip(self.offsets, self.views, strict=True):
            found = buffers.take("found", view.nbytes)
            files.pread_into(fd, found, offset + shift)
            if not np.array_equal(found, np.frombuffer(view, np.uint8)):
                files.pwrite_all(fd, view, offset + shift)
                differs = True
        return differs

    def _stage(self, files: Files, fd: int, shift: int) -> None:
        if self.outer is None or self.inner is None:
            return
        if self.sieved:
            for offset, view in zip(self.offsets, self.views, strict=True):
                files.pread_into(fd, view, offset + shift)
        self.assign(self.inner, self.outer)


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of a file whose memory lies in rows: one call moves many of them without a copy.

    Call `i` moves the bytes at `offsets[i]` and the rows `views[i]`, one after the other.
    """

    offsets: list[int]
    views: list[list[memoryview]]

    def read(self, files: Files, fd: int, shift: int) -> None:
        """Fill the memory from the file, all offsets moved by `shift`."""
        for offset, rows in zip(self.offsets, self.views, strict=True):
            files.pread_scatter(fd, rows, offset + shift)

    def write(self, files: Files, fd: int, shift: int) -> None:
        """Write the memory to the file."""
        for offset, rows in zip(self.offsets, self.views, strict=True):
            files.pwrite_gather(fd, rows, offset + shift)

    def repair(self, files: Files, fd: int, shift: int, buffers: Buffers) -> bool:
        """Compare the file with what `write` would write; write what differs, and say so."""
        differs = False
        for offset, rows in zip(self.offsets, self.views, strict=True):
            found = buffers.take("found", sum(r.nbytes for r in rows))
            files.pread_into(fd, found, offset + shift)
            if found.tobytes() != b"".join(rows):
                files.pwrite_gather(fd, rows, offset + shift)
                differs = True
        return differs


def way_to_assign(to: Array, what: Array) -> Callable[[Array, Array], None]:
    """How `to[...] = what` is done fast: in squares where the two run in different orders."""
    if to.ndim < 2 or to.size < 4 * _EDGE * _EDGE:
        return np.copyto
    a, b = _fastest(to), _fastest(what)
    return np.copyto if a == b or to.shape[a] < 8 or to.shape[b] < 8 else assign_in_squares


def assign_in_squares(to: Array, what: Array) -> None:
    """`to[...] = what` in parts small enough for the first cache to hold both orders."""
    a, b = _fastest(to), _fastest(what)
    to, what = np.moveaxis(to, (a, b), (-1, -2)), np.moveaxis(what, (a, b), (-1, -2))
    for i in range(0, to.shape[-2], _EDGE):
        for j in range(0, to.shape[-1], _EDGE * 4):
            square = (..., slice(i, i + _EDGE), slice(j, j + _EDGE * 4))
            np.copyto(to[square], what[square])


def _fastest(array: Array) -> int:
    return min(range(array.ndim), key=lambda d: abs(array.strides[d]))


def blocks(
    memory: Array, start: int, step: Sequence[int], scratch: NDArray[np.uint8], *, sieve: bool
) -> Iterator[Block | Rows]:
    """Cut an array into blocks, given the file's byte at its origin and per step of each dimension.

    All blocks use the same `scratch`, so they must be moved one after the other. With `sieve`,
    short runs that lie close together are moved with the gaps between them.
    """
    kept = [d for d in range(memory.ndim) if memory.shape[d] > 1]
    kept.sort(key=lambda d: -step[d])
    memory = memory[(*(slice(None) if n > 1 else 0 for n in memory.shape), ...)]
    rank = {d: i for i, d in enumerate(sorted(kept))}
    memory = memory.transpose([rank[d] for d in kept])
    steps = [step[d] for d in kept]
    if not kept:
        memory, steps = memory.reshape(1), [memory.itemsize]
    yield from _blocks(memory, start, steps, scratch, sieve)


def _blocks(
    memory: Array, start: int, steps: list[int], scratch: NDArray[np.uint8], sieve: bool
) -> Iterator[Block | Rows]:
    shape = memory.shape
    run, outer = grow(shape, steps, memory.itemsize)
    span, spanned = sieved(shape, steps, run, outer) if sieve else (run, outer)
    count = 1
    for n in shape[:spanned]:
        count *= n
    direct = spanned == outer and memory.flags.c_contiguous
    if not direct and spanned == outer and (rows := _rows(memory, start, steps, outer)):
        yield rows
        return
    if not direct and count * span > scratch.nbytes:
        yield from _halves(memory, start, steps, scratch, sieve, count * span)
        return
    offsets = runs(start, shape[:spanned], steps[:spanned])
    if span > CALL_BYTES:
        calls = range(0, span, CALL_BYTES)
        offsets = [offset + at for offset in offsets for at in calls]
    if direct:
        flat = memory.reshape(-1).view(np.uint8).data
        yield Block(offsets, _views(flat, span))
        return
    held, each = scratch[: count * span], span
    inside = steps[spanned:]
    for n in reversed(shape[:spanned]):
        inside = [span, *inside]
        span *= n
    inner = np.ndarray(shape, memory.dtype, held.data, 0, tuple(inside))
    views, way = _views(held.data, each), way_to_assign(memory, inner)
    yield Block(offsets, views, memory, inner, spanned < outer, way)


def _rows(memory: Array, start: int, steps: list[int], outer: int) -> Rows | None:
    """The block as rows of memory, if they are long and several make a run of the file."""
    row, depth = memory.itemsize, memory.ndim
    while depth > outer and memory.strides[depth - 1] == row:
        depth -= 1
        row *= memory.shape[depth]
    if row < ROW_BYTES or depth == outer or row > CALL_BYTES:
        return None
    lines = [memory[at].reshape(-1).view(np.uint8).data for at in np.ndindex(memory.shape[:depth])]
    a_run = math.prod(memory.shape[outer:depth])
    a_call = min(a_run, CALL_BYTES // row)
    offsets, views = [], []
    for number, offset in enumerate(runs(start, memory.shape[:outer], steps[:outer])):
        for at in range(0, a_run, a_call):
            first = number * a_run + at
            views.append(lines[first : first + min(a_call, a_run - at)])
            offsets.append(offset + at * row)
    return Rows(offsets, views)


def _halves(
    memory: Array,
    start: int,
    steps: list[int],
    scratch: NDArray[np.uint8],
    sieve: bool,
    num_bytes: int,
) -> Iterator[Block | Rows]:
    """Cut along the dimension that is outermost in the file, until scratch memory holds a part."""
    n = memory.shape[0]
    rows = max(1, min(n - 1, n * scratch.nbytes // num_bytes))
    for i in range(0, n, rows):
        part, at = memory[i : i + rows], start + i * steps[0]
        if part.shape[0] > 1 or part.ndim == 1:
            yield from _blocks(part, at, steps, scratch, sieve)
        else:
            yield from _blocks(part[0], at, steps[1:], scratch, sieve)


def grow(shape: Sequence[int], steps: Sequence[int], cell: int) -> tuple[int, int]:
    """Bytes of the contiguous runs, and how many leading dimensions enumerate them.

    Dimensions come in falling order of `steps`, the bytes per index.
    """
    run, outer = cell, len(shape)
    while outer and steps[outer - 1] == run:
        outer -= 1
        run *= shape[outer]
    return run, outer


def sieved(shape: Sequence[int], steps: Sequence[int], run: int, outer: int) -> tuple[int, int]:
    """The same once short runs are joined over their gaps; as `grow` gave it where not worth it."""
    span, payload = run, run
    while outer and run < SIEVE_RUN_BYTES:
        longer = span + (shape[outer - 1] - 1) * steps[outer - 1]
        payload *= shape[outer - 1]
        if longer > SIEVE_GAP * payload:
            break
        span, outer = longer, outer - 1
    return span, outer


def runs(start: int, shape: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Offsets of all runs, ascending where `steps` fall."""
    at = np.array([start], np.int64)
    for n, step in zip(shape, steps, strict=True):
        at = (at[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
    return [int(x) for x in at] if len(at) < 4 else at.tolist()


def _views(flat: memoryview, length: int) -> list[memoryview]:
    """Memory for runs of `length` bytes that follow one another, as much as one call takes each."""
    step = min(length, CALL_BYTES)
    return [
        flat[at : min(at + step, begin + length)]
        for begin in range(0, flat.nbytes, length)
        for at in range(begin, begin + length, step)
    ]
