"""N-d blocks of memory as contiguous runs of a file, read and written in few calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.storage.files import Files
from megtool.storage.objects.populate import populate

Array = NDArray[Any]

SIEVE_RUN_BYTES = 1024
SIEVE_GAP = 8
"""Runs shorter than this with gaps of at most this many runs are moved with their gaps."""

ROW_BYTES = 1024
"""Memory in rows of at least this size is moved row by row in one call, without a copy."""

CALL_BYTES = 1 << 20
"""The largest read or write. Threads wait for the interpreter after each one: with two threads,
smaller ones cost more time than larger ones lose by leaving the cache."""

_EDGE = 64  # elements; a transposed square of this edge stays in the L1 cache


class Buffers:
    """Scratch memory of one thread, by slot; a slot grows to the largest size requested."""

    def __init__(self, peak: PeakMemory | None = None) -> None:
        self._slots: dict[str, NDArray[np.uint8]] = {}
        self._peak = peak

    def take(self, slot: str, num_bytes: int) -> NDArray[np.uint8]:
        """`num_bytes` of uninitialized memory, the same memory for the same slot."""
        slot_buffer = self._slots.get(slot)
        if slot_buffer is None or slot_buffer.nbytes < num_bytes:
            if self._peak is not None:
                self._peak.add(num_bytes - (0 if slot_buffer is None else slot_buffer.nbytes))
            self._slots.pop(slot, None)
            slot_buffer = self._slots[slot] = np.empty(num_bytes, np.uint8)
        return slot_buffer[:num_bytes]


class PeakMemory:
    """Total memory of the buffers of all threads; it never shrinks."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count more memory."""
        with self._lock:
            self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """Runs of a file and the memory they fill.

    Run `i` is the bytes at `offsets[i]`, in memory `views[i]`. If the memory is not contiguous in
    the order of the file, the views are scratch memory, and `inner` (scratch) and `outer` (the
    memory itself) are corresponding arrays of one shape. `sieved` runs contain gaps: bytes of other
    tensors, which are read and written back unchanged.
    """

    offsets: list[int]
    views: list[memoryview]
    outer: Array | None = None
    inner: Array | None = None
    sieved: bool = False
    assign: Callable[[Array, Array], None] = np.copyto

    @property
    def is_direct(self) -> bool:
        """Whether the runs go straight to the memory, not through scratch memory."""
        return self.outer is None

    def runs(self, shift: int) -> Iterator[tuple[int, memoryview]]:
        """The runs, with all offsets shifted."""
        for offset, view in zip(self.offsets, self.views, strict=True):
            yield offset + shift, view

    def read_batch(self, files: Files, fd: int, shift: int, span: tuple[int, int]) -> None:
        """Like `read`, with many requests at a time; see `Files.pread_batch`."""
        files.pread_batch(fd, list(self.runs(shift)), span=span)
        if self.outer is not None and self.inner is not None:
            self.assign(self.outer, self.inner)

    def read(self, files: Files, fd: int, shift: int) -> None:
        """Fill the memory from the file, with all offsets shifted."""
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
        """Write what differs from the file; whether anything differed."""
        self._stage(files, fd, shift)
        differs = False
        for offset, view in zip(self.offsets, self.views, strict=True):
            current = buffers.take("found", view.nbytes)
            files.pread_into(fd, current, offset + shift)
            if not np.array_equal(current, np.frombuffer(view, np.uint8)):
                files.pwrite_all(fd, view, offset + shift)
                differs = True
        return differs

    def _stage(self, files: Files, fd: int, shift: int) -> None:
        if self.outer is None or self.inner is None:
            return
        if self.sieved:
            for offset, view in zip(self.offsets, self.views, strict=True):
                files.pread_into(fd, view, offset + shift)
                files.record(fd, offset + shift, (view,))  # cancelled, because it is written again
        self.assign(self.inner, self.outer)


@dataclass(frozen=True, slots=True)
class StridedRows:
    """Runs of a file whose memory is in rows: one call moves many of them without a copy.

    Call `i` moves the bytes at `offsets[i]` to or from the rows `views[i]`, in order.
    """

    offsets: list[int]
    views: list[list[memoryview]]
    is_direct = True

    def runs(self, shift: int) -> Iterator[tuple[int, memoryview]]:
        """The rows, each with its offset, shifted."""
        for start, rows in zip(self.offsets, self.views, strict=True):
            offset = start + shift
            for row in rows:
                yield offset, row
                offset += row.nbytes

    def read(self, files: Files, fd: int, shift: int) -> None:
        """Fill the memory from the file, with all offsets shifted."""
        for offset, rows in zip(self.offsets, self.views, strict=True):
            files.pread_scatter(fd, rows, offset + shift)

    def write(self, files: Files, fd: int, shift: int) -> None:
        """Write the memory to the file."""
        for offset, rows in zip(self.offsets, self.views, strict=True):
            files.pwrite_gather(fd, rows, offset + shift)

    def repair(self, files: Files, fd: int, shift: int, buffers: Buffers) -> bool:
        """Write what differs from the file; whether anything differed."""
        differs = False
        for offset, rows in zip(self.offsets, self.views, strict=True):
            current = buffers.take("found", sum(r.nbytes for r in rows))
            files.pread_into(fd, current, offset + shift)
            if current.tobytes() != b"".join(rows):
                files.pwrite_gather(fd, rows, offset + shift)
                differs = True
        return differs


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A block of a tile, and where its elements are in memory that is open as an object.

    `step` is in bytes, one per dimension of `values`, which is in the order of the view.
    """

    target: NDArray[np.uint8]
    offset: int
    step: tuple[int, ...]
    values: Array
    is_direct = True

    def _place(self, shift: int) -> Array:
        shape, kind = self.values.shape, self.values.dtype
        return np.ndarray(shape, kind, self.target, self.offset + shift, self.step)

    def runs(self, shift: int) -> Iterator[tuple[int, memoryview]]:
        """None: nothing is read from this process's own memory by requests."""
        yield from ()

    def read(self, files: Files, fd: int, shift: int) -> None:
        """Fill the tile from the memory."""
        np.copyto(self.values, self._place(shift))

    def write(self, files: Files, fd: int, shift: int) -> None:
        """Assign the tile to the memory."""
        place = self._place(shift)
        populate(place)
        choose_assign(place, self.values)(place, self.values)

    def repair(self, files: Files, fd: int, shift: int, buffers: Buffers) -> bool:
        """Assign the tile where it differs; whether it did."""
        if np.array_equal(self._place(shift), self.values):
            return False
        self.write(files, fd, shift)
        return True


def choose_assign(target: Array, values: Array) -> Callable[[Array, Array], None]:
    """A fast `target[...] = values`: in squares if their memory orders differ."""
    if target.ndim < 2 or target.size < 4 * _EDGE * _EDGE:
        return np.copyto
    a, b = _fastest(target), _fastest(values)
    return np.copyto if a == b or target.shape[a] < 8 or target.shape[b] < 8 else assign_in_squares


def assign_in_squares(target: Array, values: Array) -> None:
    """`target[...] = values` in squares that fit the L1 cache in both orders."""
    a, b = _fastest(target), _fastest(values)
    target, values = np.moveaxis(target, (a, b), (-1, -2)), np.moveaxis(values, (a, b), (-1, -2))
    for i in range(0, target.shape[-2], _EDGE):
        for j in range(0, target.shape[-1], _EDGE * 4):
            square = (..., slice(i, i + _EDGE), slice(j, j + _EDGE * 4))
            np.copyto(target[square], values[square])


def _fastest(array: Array) -> int:
    return min(range(array.ndim), key=lambda d: abs(array.strides[d]))


def split_blocks(
    memory: Array, start: int, step: Sequence[int], scratch: NDArray[np.uint8], *, sieve: bool
) -> Iterator[StridedBlock | StridedRows]:
    """Split an array into blocks, given its offset in the file and the bytes per step of each dim.

    All blocks use the same `scratch`, so they must be moved one after another. With `sieve`, short
    runs that are close together are moved with the gaps between them.
    """
    dims = [d for d in range(memory.ndim) if memory.shape[d] > 1]
    dims.sort(key=lambda d: -step[d])
    memory = memory[(*(slice(None) if n > 1 else 0 for n in memory.shape), ...)]
    rank = {d: i for i, d in enumerate(sorted(dims))}
    memory = memory.transpose([rank[d] for d in dims])
    steps = [step[d] for d in dims]
    if not dims:
        memory, steps = memory.reshape(1), [memory.itemsize]
    yield from _split_ordered(memory, start, steps, scratch, sieve)


def _split_ordered(
    memory: Array, start: int, steps: list[int], scratch: NDArray[np.uint8], sieve: bool
) -> Iterator[StridedBlock | StridedRows]:
    shape = memory.shape
    run, outer = contiguous_run(shape, steps, memory.itemsize)
    span, spanned = sieve_run(shape, steps, run, outer) if sieve else (run, outer)
    count = 1
    for n in shape[:spanned]:
        count *= n
    direct = spanned == outer and memory.flags.c_contiguous
    if not direct and spanned == outer and (rows := _row_block(memory, start, steps, outer)):
        yield rows
        return
    if not direct and count * span > scratch.nbytes:
        yield from _split_outermost(memory, start, steps, scratch, sieve, count * span)
        return
    offsets = run_offsets(start, shape[:spanned], steps[:spanned])
    if span > CALL_BYTES:
        calls = range(0, span, CALL_BYTES)
        offsets = [offset + start_in_run for offset in offsets for start_in_run in calls]
    if direct:
        flat = memory.reshape(-1).view(np.uint8).data
        yield StridedBlock(offsets, _views(flat, span))
        return
    staged, run_span = scratch[: count * span], span
    inside = steps[spanned:]
    for n in reversed(shape[:spanned]):
        inside = [span, *inside]
        span *= n
    inner = np.ndarray(shape, memory.dtype, staged.data, 0, tuple(inside))
    views, assign = _views(staged.data, run_span), choose_assign(memory, inner)
    yield StridedBlock(offsets, views, memory, inner, spanned < outer, assign)


def _row_block(memory: Array, start: int, steps: list[int], outer: int) -> StridedRows | None:
    """The block as rows of memory, if rows are long and several make a run of the file."""
    row, depth = memory.itemsize, memory.ndim
    while depth > outer and memory.strides[depth - 1] == row:
        depth -= 1
        row *= memory.shape[depth]
    if row < ROW_BYTES or depth == outer or row > CALL_BYTES:
        return None
    lines = [
        memory[index].reshape(-1).view(np.uint8).data for index in np.ndindex(memory.shape[:depth])
    ]
    rows_per_run = math.prod(memory.shape[outer:depth])
    rows_per_call = min(rows_per_run, CALL_BYTES // row)
    offsets, views = [], []
    for number, offset in enumerate(run_offsets(start, memory.shape[:outer], steps[:outer])):
        for index in range(0, rows_per_run, rows_per_call):
            first = number * rows_per_run + index
            views.append(lines[first : first + min(rows_per_call, rows_per_run - index)])
            offsets.append(offset + index * row)
    return StridedRows(offsets, views)


def _split_outermost(
    memory: Array,
    start: int,
    steps: list[int],
    scratch: NDArray[np.uint8],
    sieve: bool,
    num_bytes: int,
) -> Iterator[StridedBlock | StridedRows]:
    """Split along the outermost dimension in the file until a part fits the scratch memory."""
    n = memory.shape[0]
    rows = max(1, min(n - 1, n * scratch.nbytes // num_bytes))
    for i in range(0, n, rows):
        part, offset = memory[i : i + rows], start + i * steps[0]
        if part.shape[0] > 1 or part.ndim == 1:
            yield from _split_ordered(part, offset, steps, scratch, sieve)
        else:
            yield from _split_ordered(part[0], offset, steps[1:], scratch, sieve)


def contiguous_run(shape: Sequence[int], steps: Sequence[int], cell: int) -> tuple[int, int]:
    """The bytes of contiguous runs, and the number of leading dimensions that enumerate them.

    Dimensions come in falling order of `steps`, the bytes per index.
    """
    run, outer = cell, len(shape)
    while outer and steps[outer - 1] == run:
        outer -= 1
        run *= shape[outer]
    return run, outer


def sieve_run(shape: Sequence[int], steps: Sequence[int], run: int, outer: int) -> tuple[int, int]:
    """The same after joining short runs over their gaps; unchanged if that does not pay."""
    span, payload = run, run
    while outer and run < SIEVE_RUN_BYTES:
        longer = span + (shape[outer - 1] - 1) * steps[outer - 1]
        payload *= shape[outer - 1]
        if longer > SIEVE_GAP * payload:
            break
        span, outer = longer, outer - 1
    return span, outer


def run_offsets(start: int, shape: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Offsets of all runs, ascending if `steps` descend."""
    offsets = np.array([start], np.int64)
    for n, step in zip(shape, steps, strict=True):
        offsets = (offsets[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
    return [int(x) for x in offsets] if len(offsets) < 4 else offsets.tolist()


def _views(flat: memoryview, length: int) -> list[memoryview]:
    """Memory of consecutive runs of `length` bytes, in pieces of at most one call."""
    step = min(length, CALL_BYTES)
    return [
        flat[position : min(position + step, begin + length)]
        for begin in range(0, flat.nbytes, length)
        for position in range(begin, begin + length, step)
    ]
