"""Tiles: row-major pieces of a tensor, gathered from shards and scattered to shards."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.dtypes import DType
from megtool.storage.files import Files
from megtool.storage.objects.open_objects import is_object
from megtool.storage.open_files import OpenFiles
from megtool.storage.stores.read_pool import read_pool
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import add_shift, make_converter
from megtool.transport.shard_locator import FileView
from megtool.transport.strided import (
    Array,
    Buffers,
    MemoryBlock,
    StridedBlock,
    StridedRows,
    contiguous_run,
    split_blocks,
)

Index = tuple[int, ...]
Block = StridedBlock | StridedRows | MemoryBlock

DECENT_RUN_BYTES = 4096
"""Runs of this size move at nearly full speed: tiles grow until source and target have them."""

COMPUTED_BYTES = 4 << 20
"""What feeds and decoding compute at a time, if memory allows. They make several passes with numpy,
and threads wait for the interpreter between passes. Larger tiles save more of these waits than they
cost by leaving the L2 cache."""


def split_box(
    lo: Index, hi: Index, cell_bytes: int, max_bytes: int, *, depth: int | None = None
) -> Iterator[tuple[Index, Index]]:
    """Split a box that is contiguous in row-major order into such boxes of at most `max_bytes`.

    In order, and as even as whole indices of one dimension allow. Dimensions from `depth` on and
    elements are never cut, so a box may be larger than `max_bytes`.
    """
    depth = len(lo) if depth is None else depth
    size = [b - a for a, b in zip(lo, hi, strict=True)]
    d = next((d for d in range(len(size)) if size[d] != 1), len(size))
    total = cell_bytes * math.prod(size)
    if d >= depth or total <= max_bytes:
        if total:
            yield lo, hi
        return
    inner = total // size[d]
    rows = max(1, max_bytes // inner)
    rows = -(-size[d] // -(-size[d] // rows))
    for i in range(lo[d], hi[d], rows):
        part = (*lo[:d], i, *lo[d + 1 :]), (*hi[:d], min(i + rows, hi[d]), *hi[d + 1 :])
        if inner > max_bytes:
            yield from split_box(*part, cell_bytes, max_bytes, depth=depth)
        else:
            yield part


def halve_box(lo: Index, hi: Index, max_elements: int) -> Iterator[tuple[Index, Index]]:
    """Split any box into boxes of at most `max_elements`, along its longest dimensions."""
    size = [b - a for a, b in zip(lo, hi, strict=True)]
    if math.prod(size) <= max(max_elements, 1):
        yield lo, hi
        return
    d = max(range(len(size)), key=lambda d: size[d])
    middle = lo[d] + size[d] // 2
    yield from halve_box(lo, (*hi[:d], middle, *hi[d + 1 :]), max_elements)
    yield from halve_box((*lo[:d], middle, *lo[d + 1 :]), hi, max_elements)


@dataclass(frozen=True, slots=True)
class _Part:
    """The overlap of a tile with one piece: its blocks, and their shift when the tile moves.

    `span` is the range of the whole piece in the file.
    """

    fd: int
    blocks: list[Block]
    step: list[int]
    span: tuple[int, int]


class TileIO:
    """Moves the tiles of one tensor between memory and files.

    Consecutive tiles mostly overlap the same pieces at other offsets, so the calls planned for one
    tile are reused with shifted offsets for as long as that is valid.
    """

    def __init__(
        self,
        file_view: FileView,
        files: Files,
        open_files: OpenFiles,
        scratch: Array,
        buffers: Buffers,
        *,
        sieve: bool,
    ) -> None:
        self._file_view, self._files, self._open_files = file_view, files, open_files
        self._scratch, self._buffers, self._sieve = scratch, buffers, sieve
        self._parts: list[_Part] = []
        self._acquired: list[int] = []
        self._memory: Array | None = None
        self._lo: Index = ()
        self._range: list[tuple[int, int]] = []

    def read(self, lo: Index, memory: Array) -> None:
        """Fill `memory`, the tile that begins at view index `lo`."""
        shifted = self._shifted(lo, memory)
        if any(is_object(part.fd) for part in self._parts):
            self._read_objects(shifted)
            return
        for block, fd, shift in shifted:
            block.read(self._files, fd, shift)

    def _read_objects(self, shifted: list[tuple[Block, int, int]]) -> None:
        """Read blocks of objects, with many requests at a time."""
        jobs: list[Callable[[], None]] = []
        blocks = iter(shifted)
        for part in self._parts:
            runs: list[tuple[int, memoryview]] = []
            for block, fd, shift in itertools.islice(blocks, len(part.blocks)):
                if isinstance(block, StridedBlock) and not block.is_direct:
                    # Such blocks share scratch memory: one after another.
                    block.read_batch(self._files, fd, shift, part.span)
                else:
                    runs += block.runs(shift)
            if runs:
                jobs.append(
                    functools.partial(self._files.pread_batch, part.fd, runs, span=part.span)
                )
        if jobs:
            read_pool().run(jobs)

    def write(self, lo: Index, memory: Array) -> None:
        """Write the tile that begins at `lo`."""
        for block, fd, shift in self._shifted(lo, memory):
            block.write(self._files, fd, shift)

    def repair(self, lo: Index, memory: Array) -> bool:
        """Compare the files with the tile and rewrite what differs; whether anything differed."""
        differs = False
        for block, fd, shift in self._shifted(lo, memory):
            differs |= block.repair(self._files, fd, shift, self._buffers)
        return differs

    def close(self) -> None:
        """Release the files and the memory."""
        for row in self._acquired:
            self._open_files.release(self._file_view.paths[row])
        self._acquired, self._parts, self._memory = [], [], None

    def __enter__(self) -> TileIO:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shifted(self, lo: Index, memory: Array) -> list[tuple[Block, int, int]]:
        """The blocks under a tile, with their files and the shift of their offsets."""
        if not self._is_same_memory(memory) or not self._follows(lo, memory.shape):
            self._plan_blocks(lo, memory)
        shifts = [0] * len(self._parts)
        for d, (a, b) in enumerate(zip(lo, self._lo, strict=True)):
            if a != b:
                shifts = [s + (a - b) * p.step[d] for s, p in zip(shifts, self._parts, strict=True)]
        pairs = zip(self._parts, shifts, strict=True)
        return [(block, p.fd, shift) for p, shift in pairs for block in p.blocks]

    def _is_same_memory(self, memory: Array) -> bool:
        """Whether the blocks were planned for this array, or for the same memory."""
        planned = self._memory
        if planned is None or memory is planned:
            return planned is not None
        interfaces = memory.__array_interface__, planned.__array_interface__
        return all(
            interfaces[0][k] == interfaces[1][k] for k in ("data", "shape", "strides", "typestr")
        )

    def _follows(self, lo: Index, shape: Index) -> bool:
        return all(
            a == b or (first <= a and a + n <= end)
            for a, b, n, (first, end) in zip(lo, self._lo, shape, self._range, strict=False)
        )

    def _plan_blocks(self, lo: Index, memory: Array) -> None:
        """Find the pieces under a tile, and the range in which shifting the offsets is enough.

        If every piece spans the tile in a dimension, the tile may move there until one piece ends:
        pieces are disjoint, so no other piece can appear before.
        """
        self.close()
        file_view, ndim = self._file_view, self._file_view.ndim
        a = np.array(lo, np.int64)
        b = a + np.array(memory.shape[:ndim], np.int64)
        rows = np.flatnonzero(((file_view.lo < b) & (file_view.hi > a)).all(axis=1))
        p_lo, p_hi = file_view.lo[rows], file_view.hi[rows]
        spans = np.all((p_lo <= a) & (p_hi >= b), axis=0, keepdims=True)[0].tolist()
        first, end = np.maximum(p_lo, a), np.minimum(p_hi, b)
        start = file_view.start[rows] + ((first - p_lo) * file_view.step[rows]).sum(axis=1)
        self._range = [
            (int(p_lo[:, d].max()), int(p_hi[:, d].min())) if spans[d] and len(rows) else (0, -1)
            for d in range(ndim)
        ]
        table = zip(
            rows.tolist(),
            (first - a).tolist(),
            (end - a).tolist(),
            start.tolist(),
            file_view.step[rows].tolist(),
            strict=True,
        )
        for row, x, y, offset, step in table:
            fd = self._open_files.acquire(file_view.paths[row])
            self._acquired.append(row)
            index: tuple[Any, ...] = (
                *map(slice, x, y),
                ...,
            )  # the ellipsis keeps a 0-d result an array
            within = [*step, memory.itemsize] if memory.ndim > ndim else step
            target = self._files.opened_memory(fd)
            parts: list[Block]
            if target is not None:
                parts = [MemoryBlock(target, offset, tuple(within), memory[index])]
            else:
                parts = list(
                    split_blocks(memory[index], offset, within, self._scratch, sieve=self._sieve)
                )
            self._parts.append(_Part(fd, parts, step, self._span(row)))
        self._lo, self._memory = lo, memory

    def _span(self, row: int) -> tuple[int, int]:
        """The range of a piece in its file, or of the whole shard where it is known."""
        view = self._file_view
        if view.spans is not None:
            return int(view.spans[row, 0]), int(view.spans[row, 1])
        distance = (view.hi[row] - view.lo[row] - 1) * view.step[row]
        first = int(view.start[row]) + int(np.minimum(distance, 0).sum())
        return first, int(view.start[row]) + int(np.maximum(distance, 0).sum()) + view.cell_bytes


class TileReader:
    """Reads a tensor tile by tile in row-major order, converted to the target dtype.

    With `shift` that is added to all elements. `overflowed` counts the numbers that became
    infinite so far, `rounded` the sums that the target dtype does not hold exactly.
    """

    def __init__(
        self,
        file_view: FileView,
        files: Files,
        open_files: OpenFiles,
        buffers: Buffers,
        *,
        source: GlobalTensor,
        target: DType,
        tile_bytes: int,
        shift: float = 0.0,
    ) -> None:
        self._file_view, self._buffers, self._tile_bytes = file_view, buffers, tile_bytes
        self._item = target.itemsize
        self._packed = source.packing is not None
        self._convert = make_converter(source, target, file_view.window)
        self._dtypes, self._shift = (source.dtype, target), shift
        if shift:
            self._convert = self._add
        self._cell = max(source.dtype.itemsize, target.itemsize, 4 if self._packed else 1)
        self._io = TileIO(
            file_view, files, open_files, buffers.take("scratch", tile_bytes), buffers, sieve=True
        )
        self._shaped: dict[Index, tuple[Array, Array]] = {}
        self.overflowed = self.rounded = 0

    def _add(self, raw: Array, out: Array) -> int:
        source, target = self._dtypes
        overflowed, rounded = add_shift(raw, source, out, target, self._shift)
        self.rounded += rounded
        return overflowed

    def tiles(self, lo: Index, hi: Index) -> Generator[tuple[Index, Array], None, None]:
        """Tiles of the row-major-contiguous box `lo:hi`: their first index and their elements.

        Elements are unsigned integers of the dtype's width, in the shape of the tile. The array is
        reused for the next tile. Close the generator to release the files.
        """
        try:
            for a, b in split_box(lo, hi, self._cell, self._tile_bytes, depth=self._file_view.ndim):
                yield a, self.tile(a, b)
        finally:
            self.close()

    def tile(self, lo: Index, hi: Index) -> Array:
        """The elements of one box of any size; `close` releases the files."""
        raw, out = self._arrays(tuple(y - x for x, y in zip(lo, hi, strict=True)))
        self._io.read(lo[: self._file_view.ndim], raw)
        if self._convert is not None:
            self.overflowed += self._convert(raw, out)
        return out

    def close(self) -> None:
        """Release the files."""
        self._io.close()

    def _arrays(self, shape: Index) -> tuple[Array, Array]:
        if shape not in self._shaped:
            if len(self._shaped) > 8:
                self._shaped.clear()
            out = shaped_buffer(self._buffers, "tile", shape, self._item)
            raw = out
            if self._packed:
                rows = (*shape[: self._file_view.ndim], self._file_view.cell_bytes)
                raw = shaped_buffer(self._buffers, "raw", rows, 1)
            elif self._convert is not None:
                raw = shaped_buffer(self._buffers, "raw", shape, self._file_view.cell_bytes)
            self._shaped[shape] = raw, out
        return self._shaped[shape]


def shaped_buffer(buffers: Buffers, slot: str, shape: Index, item_bytes: int) -> Array:
    """A buffer as an array of unsigned integers."""
    flat = buffers.take(slot, math.prod(shape) * item_bytes)
    return flat.view(f"<u{item_bytes}").reshape(shape)


def choose_tile_bytes(
    file_views: Sequence[FileView], lo: Index, hi: Index, cell_bytes: int, default: int, cap: int
) -> int:
    """The tile size at which all files have long runs: `default`, or more, up to `cap`."""
    best, best_run = default, -1
    size = default
    while True:
        first = next(split_box(lo, hi, cell_bytes, size), (lo, hi))
        run = min((_run_bytes(s, *first) for s in file_views), default=DECENT_RUN_BYTES)
        if run > best_run:
            best, best_run = size, run
        if run >= DECENT_RUN_BYTES or size >= cap or first == (lo, hi):
            return min(best, max(cap, default))
        size *= 2


def _run_bytes(file_view: FileView, lo: Index, hi: Index) -> int:
    """The mean run length, in its file, of the largest piece under a box."""
    a, b = np.array(lo[: file_view.ndim], np.int64), np.array(hi[: file_view.ndim], np.int64)
    first, end = np.maximum(file_view.lo, a), np.minimum(file_view.hi, b)
    volume = np.maximum(end - first, 0).prod(axis=1)
    if not len(volume) or not volume.max():
        return DECENT_RUN_BYTES
    row = int(volume.argmax())
    shape, step = (end - first)[row].tolist(), file_view.step[row].tolist()
    order = sorted((d for d in range(file_view.ndim) if shape[d] > 1), key=lambda d: -step[d])
    run, outer = contiguous_run(
        [shape[d] for d in order], [step[d] for d in order], file_view.cell_bytes
    )
    return run if outer else DECENT_RUN_BYTES
