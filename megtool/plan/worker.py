"""A worker thread that executes the units of a plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.digests.crc32c import Digests
from megtool.options.execution import DigestMode
from megtool.plan.copies import Op, PlanEntry, ReshardPlan, ShardPieces
from megtool.plan.kernel_copy import CopyRuns, plan_kernel_copies, spans_of
from megtool.plan.work_units import (
    FeedUnit,
    KernelUnit,
    Slab,
    TiledUnit,
    Unit,
    cut_depth,
)
from megtool.storage.files import Files
from megtool.storage.location.path import choose_by_latency, is_remote
from megtool.storage.objects.populate import populate
from megtool.storage.open_files import OpenFiles
from megtool.tensors.box import strides
from megtool.tensors.grouping import distinct
from megtool.tensors.placement import Placement
from megtool.transport.cast import add_shift, encode_element
from megtool.transport.merge import MergedTiles
from megtool.transport.quantized_decode import PackedTileReader, open_tile_reader
from megtool.transport.reduce import WeightedSum, sum_dtype
from megtool.transport.shard_locator import FileView, ShardLocator
from megtool.transport.strided import Array, Buffers, PeakMemory
from megtool.transport.tile import (
    COMPUTED_BYTES,
    Index,
    TileIO,
    TileReader,
    choose_tile_bytes,
    halve_box,
    shaped_buffer,
    split_box,
)
from megtool.transport.weight_update import (
    UPDATE_CACHE_BYTES,
    UpdateAdder,
    WeightUpdate,
)

if TYPE_CHECKING:
    from megtool.transport.computed_tensors import TensorFeed

PROGRESS_BYTES = 4 << 20
"""Progress is reported in steps of at least this many bytes."""

FILL_BYTES = 2 << 20
"""Memory that gets its pages in one call and is then read into, while the cache holds the pages."""

NUM_BUFFERS = 6
"""Buffers of a thread: tile, raw, scratch, found, and those of decoding."""


Tiles = Generator[tuple[Index, Array], None, None]
AnyReader = TileReader | PackedTileReader | WeightedSum | MergedTiles


class Stopped(Exception):
    """Another thread failed, or the user stopped the run."""


@dataclass(slots=True, kw_only=True)
class CopyContext:
    """State shared by all threads; `memory_bytes` is the limit of each.

    `overflowed` counts the numbers that became infinite by entry, `fed_overflowed` those of feeds
    by stored tensor, `rounded` by entry the sums of shifted elements that are not exact.
    """

    plan: ReshardPlan
    files: Files
    readers: OpenFiles
    writers: OpenFiles
    sources: list[ShardLocator]
    target: ShardLocator
    digests: Digests
    digest: DigestMode
    memory_bytes: int
    tile_bytes: int
    peak: PeakMemory
    progress: Callable[[int], None] | None
    num_bytes: Counter[Op] = field(default_factory=Counter)
    overflowed: Counter[int] = field(default_factory=Counter)
    fed_overflowed: Counter[str] = field(default_factory=Counter)
    rounded: Counter[int] = field(default_factory=Counter)
    kernel_bytes: int = 0
    repaired: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worker:
    """Executes units one after another, with its own buffers."""

    def __init__(self, run: CopyContext) -> None:
        self._run, self._plan = run, run.plan
        self._buffers = Buffers(run.peak)
        self._cap = max(run.memory_bytes // NUM_BUFFERS, 64 * 1024)
        self._tile_bytes = min(run.tile_bytes, self._cap)
        self._done: Counter[Op] = Counter()
        self._unreported = 0
        self._adder_bytes = 0
        self._verify = self._differs = False

    def do(self, unit: Unit, *, verify: bool) -> None:
        """Execute one unit; with `verify`, compare the target and write only what differs.

        Raises:
            Stopped: `CopyContext.stopped` is set; the unit is not finished.
        """
        self._done.clear()
        self._verify, self._differs = verify, False
        if isinstance(unit, KernelUnit):
            self._plain(unit)
        elif isinstance(unit, FeedUnit):
            for number in unit.feeds:
                self._feed(self._plan.feeds[number])
        else:
            self._locate_sources(unit)
            for slab in unit.slabs:
                self._slab(slab, unit)
        self._report(0, now=True)
        with self._run.lock:
            self._run.num_bytes.update(self._done)
            self._run.repaired += self._differs
            if isinstance(unit, KernelUnit):
                self._run.kernel_bytes += sum(self._done.values())

    def _report(self, num_bytes: int, *, now: bool = False) -> None:
        if self._run.stopped.is_set():
            raise Stopped
        self._unreported += num_bytes
        if self._unreported >= PROGRESS_BYTES or (now and self._unreported):
            if self._run.progress is not None:
                with self._run.lock:
                    self._run.progress(self._unreported)
            self._unreported = 0

    def _plain(self, unit: KernelUnit) -> None:
        run = self._run
        table, permuted = plan_kernel_copies(self._plan, unit, run.sources, run.target)
        for row in permuted:
            self._step(row)
        if self._plan.fills_memory:
            self._fill(table)
            return
        with run.writers.use(run.target.path(unit.files[0])) as target:
            for source, file, source_offset, _, target_offset, length in table.rows():
                with run.readers.use(run.sources[source].path(file)) as fd:
                    if self._verify:
                        self._repair(fd, source_offset, target, target_offset, length)
                    else:
                        run.files.copy_range(fd, source_offset, target, target_offset, length)
                self._done[Op.COPY] += length
                self._report(length)

    def _fill(self, table: CopyRuns) -> None:
        """Read runs, in order of their source, straight into memory."""
        run = self._run
        memory: dict[int, Array] = {}
        for file in distinct(table.target_file).tolist():
            with run.writers.use(run.target.path(file)) as fd:
                data = run.files.opened_memory(fd)
            if data is None:
                raise ValueError(f"{run.target.path(file)} is not memory")
            memory[file] = data
        for runs in table.read_calls():
            source, file = int(runs.source[0]), int(runs.file[0])
            path = run.sources[source].path(file)
            step = choose_by_latency(path, FILL_BYTES, int(runs.length.sum()))
            with run.readers.use(path) as fd:
                for offset, rows in runs.in_steps(step):
                    for to, (lo, hi) in spans_of(rows).items():
                        populate(memory[to][lo:hi])
                    buffers = [memory[to].data[start : start + n] for to, start, n in rows]
                    run.files.pread_scatter(fd, buffers, offset)
                    num_bytes = sum(b.nbytes for b in buffers)
                    self._done[Op.COPY] += num_bytes
                    self._report(num_bytes)

    def _repair(
        self, fd: int, source_offset: int, target: int, target_offset: int, length: int
    ) -> None:
        files = self._run.files
        for start in range(0, length, self._tile_bytes):
            n = min(self._tile_bytes, length - start)
            expected, current = self._buffers.take("tile", n), self._buffers.take("found", n)
            files.pread_into(fd, expected, source_offset + start)
            files.pread_into(target, current, target_offset + start)
            if not np.array_equal(expected, current):
                files.pwrite_all(target, expected, target_offset + start)
                self._differs = True

    def _step(self, row: int) -> None:
        """Copy one step through memory, whatever its strides."""
        plan, steps = self._plan, self._plan.steps
        entry = plan.entries[int(steps.entry[row])]
        a, b = int(steps.source_piece[row]), int(steps.target_piece[row])
        locator = self._run.sources[entry.source_index]
        source = _locate_pieces(locator, entry.source, entry.source_tensor, plan.source_pieces, [a])
        sink = _locate_pieces(
            self._run.target, entry.target, entry.target_tensor, plan.target_pieces, [b]
        )
        item, n = plan.target_tensor(entry).dtype.itemsize, len(entry.shape)
        lo, hi = steps.boxes.lo[row, :n].tolist(), steps.boxes.hi[row, :n].tolist()
        with (
            self._traffic(source, self._tile_bytes, reads=True) as input_io,
            self._traffic(sink, self._tile_bytes) as output_io,
        ):
            for x, y in halve_box(tuple(lo), tuple(hi), self._tile_bytes // item):
                shape = tuple(q - p for p, q in zip(x, y, strict=True))
                tile = shaped_buffer(self._buffers, "tile", shape, item)
                input_io.read(x, tile)
                self._put(output_io, x, tile, Op.COPY)

    def _feed(self, feed: TensorFeed) -> None:
        """Write the elements that a feed generates."""
        from megtool.transport.computed_tensors import RegionReader, locate_whole

        run = self._run
        size = min(COMPUTED_BYTES, self._cap)
        reader = RegionReader(
            run.sources[0], run.files, run.readers, self._buffers, tile_bytes=size
        )
        with ExitStack() as stack:
            outputs = [
                stack.enter_context(self._traffic(locate_whole(run.target, r.placement), size))
                for r in feed.writes
            ]
            for number, index, tile in stack.enter_context(closing(feed.generate(reader))):
                self._put(outputs[number], index, tile, Op.ENCODE)
        if reader.overflowed:
            with run.lock:
                run.fed_overflowed.update(reader.overflowed)

    def _locate_sources(self, unit: TiledUnit) -> None:
        """Locate all shards that a unit reads at once, for which each file is opened once."""
        plan, pieces = self._plan, self._plan.source_pieces
        shards: dict[int, list[NDArray[np.int64]]] = {}
        for slab in unit.slabs:
            is_filled = plan.entries[slab.entry].op is Op.FILL
            for term in () if is_filled else plan.terms(slab.entry):
                entry = plan.entries[term]
                if plan.source_tensor(entry).name not in plan.sources[entry.source_index].packed:
                    is_whole = not any(slab.lo) and tuple(slab.hi) == tuple(entry.shape)
                    rows = pieces.of(term) if is_whole else _find_rows(pieces, slab, term)
                    shards.setdefault(entry.source_index, []).append(pieces.shard[rows])
        for number, some in shards.items():
            self._run.sources[number].offsets(np.concatenate(some))

    def _slab(self, slab: Slab, unit: TiledUnit) -> None:
        plan, run = self._plan, self._run
        entry = plan.entries[slab.entry]
        under = _find_rows(plan.target_pieces, slab, slab.entry)
        sink = _locate_pieces(
            run.target, entry.target, entry.target_tensor, plan.target_pieces, under
        )
        reader: AnyReader | None = None
        if entry.op is Op.FILL:
            size, tiles = self._tile_bytes, self._filled(entry, slab)
        else:
            size, reader = self._open_tiles(slab, sink)
            tiles = reader.tiles(slab.lo, slab.hi)
        step = strides(entry.shape)
        digested = entry.op is not Op.FILL and run.digest is not DigestMode.NONE
        with closing(tiles), self._traffic(sink, size, sieve=unit.interleaved) as output_io:
            for index, tile in tiles:
                if digested:
                    offset = sum(i * s for i, s in zip(index, step, strict=True)) * tile.itemsize
                    run.digests.add(entry.canonical, offset, self._read_again(entry, tile))
                self._put(output_io, index, tile, entry.op)
        if reader is not None and (reader.overflowed or reader.rounded):
            with run.lock:
                run.overflowed += Counter({slab.entry: reader.overflowed})
                run.rounded += Counter({slab.entry: reader.rounded})

    def _read_again(self, entry: PlanEntry, tile: Array) -> Array:
        """The canonical elements of a tile to write, as they are read from the target."""
        if not entry.target.shift:
            return tile
        kind, out = self._plan.target_tensor(entry).dtype, np.empty_like(tile)
        add_shift(np.ascontiguousarray(tile), kind, out, kind, -entry.target.shift)
        return out

    def _open_tiles(self, slab: Slab, sink: FileView) -> tuple[int, AnyReader]:
        """The tile size of a slab, and the reader that converts (and sums) its tiles."""
        plan, run = self._plan, self._run
        slab_entry = plan.entries[slab.entry]
        target = plan.target_tensor(slab_entry).dtype
        terms = plan.terms(slab.entry)
        sums = slab_entry.op in (Op.REDUCE, Op.MERGE)
        kind = sum_dtype(target) if sums else target
        cap = run.memory_bytes // (NUM_BUFFERS + 1) if sums else self._cap
        file_views: list[FileView] = []
        cell = kind.itemsize
        for entry in (plan.entries[n] for n in terms):
            under = _find_rows(plan.source_pieces, slab, terms[len(file_views)])
            locator = run.sources[entry.source_index]
            file_views.append(
                _locate_pieces(
                    locator, entry.source, entry.source_tensor, plan.source_pieces, under
                )
            )
            cell = max(cell, plan.source_dtype_bytes(entry))
        decodes = any(file_view.packed is not None for file_view in file_views)
        computes = decodes or bool(slab_entry.updates)
        default = min(COMPUTED_BYTES, cap) if computes else self._tile_bytes
        size = choose_tile_bytes([*file_views, sink], slab.lo, slab.hi, cell, default, cap)
        readers = [
            open_tile_reader(
                file_view,
                run.files,
                run.readers,
                self._buffers,
                source=plan.source_tensor(plan.entries[n]),
                target=kind,
                tile_bytes=size,
                shift=plan.entries[n].shift,
            )
            for n, file_view in zip(terms, file_views, strict=True)
        ]
        if not sums:
            return size, readers[0]
        if slab_entry.updates:
            merge = MergedTiles(
                readers[0],
                self._open_adder(slab_entry.updates),
                self._buffers,
                shape=slab_entry.shape,
                target=target,
                tile_bytes=size,
                cell_bytes=cell,
                depth=cut_depth(plan, slab.entry),
            )
            return size, merge
        shares = [plan.entries[n].share for n in terms]
        reduction = WeightedSum(
            list(zip(shares, readers, strict=True)),
            self._buffers,
            target=target,
            tile_bytes=size,
            cell_bytes=cell,
            depth=cut_depth(plan, slab.entry),
        )
        return size, reduction

    def _open_adder(self, updates: Sequence[WeightUpdate]) -> UpdateAdder:
        """What adds updates, in memory that is counted once for this thread."""
        cache_bytes = min(UPDATE_CACHE_BYTES, self._cap)
        more = UpdateAdder.num_bytes(updates, cache_bytes) - self._adder_bytes
        if more > 0:
            self._run.peak.add(more)
            self._adder_bytes += more
        return UpdateAdder(updates, cache_bytes=cache_bytes)

    def _filled(self, entry: PlanEntry, slab: Slab) -> Tiles:
        target = self._plan.target_tensor(entry).dtype
        value = encode_element(entry.fill, target)
        last: tuple[Index, Array] | None = None
        for a, b in split_box(slab.lo, slab.hi, target.itemsize, self._tile_bytes):
            shape = tuple(y - x for x, y in zip(a, b, strict=True))
            if last is None or last[0] != shape:
                last = shape, shaped_buffer(self._buffers, "tile", shape, target.itemsize)
                last[1][...] = value[0]
            yield a, last[1]

    def _put(self, io: TileIO, index: Index, tile: Array, op: Op) -> None:
        if self._verify:
            self._differs |= io.repair(index, tile)
        else:
            io.write(index, tile)
        self._done[op] += tile.nbytes
        self._report(tile.nbytes)

    def _traffic(
        self, side: FileView, num_bytes: int, *, reads: bool = False, sieve: bool = False
    ) -> TileIO:
        run = self._run
        opened = run.readers if reads else run.writers
        scratch = self._buffers.take("scratch", num_bytes)
        if sieve and not reads:  # an object under construction knows what is written of it
            sieve = not any(is_remote(path) for path in side.paths)
        return TileIO(side, run.files, opened, scratch, self._buffers, sieve=sieve or reads)


def _find_rows(pieces: ShardPieces, slab: Slab, entry: int) -> list[int]:
    """Rows of an entry's pieces that overlap a slab of the same view."""
    of, n = pieces.of(entry), len(slab.lo)
    lo, hi = pieces.boxes.lo[of, :n], pieces.boxes.hi[of, :n]
    meets = ((lo < np.array(slab.hi, np.int64)) & (hi > np.array(slab.lo, np.int64))).all(axis=1)
    return [of.start + row for row in np.flatnonzero(meets).tolist()]


def _locate_pieces(
    locator: ShardLocator,
    placement: Placement | None,
    tensor: int,
    pieces: ShardPieces,
    rows: list[int],
) -> FileView:
    if placement is None:
        raise ValueError("an entry with elements has a placement on both sides")
    index = np.array(rows, np.int64)
    return locator.locate(placement, tensor, pieces.shard[index], pieces.boxes[index])
