"""Worker: one thread's way through the units of a plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np

from megtool.checkpoint.computed_tensors import Feed, Taking, side_of
from megtool.checkpoint.digest import DigestMode, Digests
from megtool.checkpoint.plan import Entry, Op, Pieces, Plan
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.open_files import OpenFiles
from megtool.checkpoint.transport.cast import element
from megtool.checkpoint.transport.kernel_copy import copies
from megtool.checkpoint.transport.quantized_decode import PackedIntake, take_in
from megtool.checkpoint.transport.reduce import Reduction, reduced_in
from megtool.checkpoint.transport.shard_locator import Locator, Side
from megtool.checkpoint.transport.strided import Array, Buffers, Peak
from megtool.checkpoint.transport.tile import (
    COMPUTED_BYTES,
    Index,
    Intake,
    Traffic,
    cut,
    halved,
    shaped,
    tile_bytes,
)
from megtool.checkpoint.transport.work_units import Fed, Plain, Slab, Tiled, Unit, depth
from megtool.tensors.box import strides
from megtool.tensors.placement import Placement

TELL_BYTES = 4 << 20
"""Progress is told no more often than this."""

SLOTS = 6
"""Buffers of a thread: tile, raw, scratch, found, and what decoding takes besides."""


Tiles = Generator[tuple[Index, Array], None, None]


class Stopped(Exception):
    """Another thread failed, or the user stopped the run."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What all threads share; `memory_bytes` is what each may use.

    Of every entry, `overflowed` counts the numbers that became infinite; `fed_overflowed` those of
    feeds, by stored tensor.
    """

    plan: Plan
    files: Files
    readers: OpenFiles
    writers: OpenFiles
    sources: list[Locator]
    target: Locator
    digests: Digests
    digest: DigestMode
    memory_bytes: int
    tile_bytes: int
    peak: Peak
    progress: Callable[[int], None] | None
    num_bytes: Counter[Op] = field(default_factory=Counter)
    overflowed: Counter[int] = field(default_factory=Counter)
    fed_overflowed: Counter[str] = field(default_factory=Counter)
    kernel_bytes: int = 0
    repaired: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worker:
    """Does units one after the other, with buffers of its own."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.plan
        self._buffers = Buffers(run.peak)
        self._cap = max(run.memory_bytes // SLOTS, 64 * 1024)
        self._usual = min(run.tile_bytes, self._cap)
        self._done: Counter[Op] = Counter()
        self._untold = 0
        self._verify = self._differs = False

    def do(self, unit: Unit, *, verify: bool) -> None:
        """Do one unit; with `verify`, compare what is there and write only what differs.

        Raises:
            Stopped: somebody set `Run.stopped`; the unit is not finished.
        """
        self._done.clear()
        self._verify, self._differs = verify, False
        if isinstance(unit, Plain):
            self._plain(unit)
        elif isinstance(unit, Fed):
            for number in unit.feeds:
                self._feed(self._plan.feeds[number])
        else:
            for slab in unit.slabs:
                self._slab(slab, unit)
        self._tell(0, now=True)
        with self._run.lock:
            self._run.num_bytes.update(self._done)
            self._run.repaired += self._differs
            if isinstance(unit, Plain):
                self._run.kernel_bytes += sum(self._done.values())

    def _tell(self, num_bytes: int, *, now: bool = False) -> None:
        if self._run.stopped.is_set():
            raise Stopped
        self._untold += num_bytes
        if self._untold >= TELL_BYTES or (now and self._untold):
            if self._run.progress is not None:
                with self._run.lock:
                    self._run.progress(self._untold)
            self._untold = 0

    def _plain(self, unit: Plain) -> None:
        run = self._run
        table, permuted = copies(self._plan, unit, run.sources, run.target)
        for row in permuted:
            self._step(row)
        with run.writers.use(run.target.path(unit.files[0])) as target:
            for source, file, at, offset, length in table.rows():
                with run.readers.use(run.sources[source].path(file)) as fd:
                    if self._verify:
                        self._repair(fd, at, target, offset, length)
                    else:
                        run.files.copy_range(fd, at, target, offset, length)
                self._done[Op.COPY] += length
                self._tell(length)

    def _repair(self, fd: int, at: int, target: int, offset: int, length: int) -> None:
        files = self._run.files
        for start in range(0, length, self._usual):
            n = min(self._usual, length - start)
            want, found = self._buffers.take("tile", n), self._buffers.take("found", n)
            files.pread_into(fd, want, at + start)
            files.pread_into(target, found, offset + start)
            if not np.array_equal(want, found):
                files.pwrite_all(target, want, offset + start)
                self._differs = True

    def _step(self, row: int) -> None:
        """Copy one step through memory, whatever its strides."""
        plan, steps = self._plan, self._plan.steps
        entry = plan.entries[int(steps.entry[row])]
        a, b = int(steps.source_piece[row]), int(steps.target_piece[row])
        locator = self._run.sources[entry.source_index]
        source = _side(locator, entry.source, entry.source_tensor, plan.source_pieces, [a])
        sink = _side(self._run.target, entry.target, entry.target_tensor, plan.target_pieces, [b])
        item, n = plan.target_tensor(entry).dtype.itemsize, len(entry.shape)
        lo, hi = steps.boxes.lo[row, :n].tolist(), steps.boxes.hi[row, :n].tolist()
        with (
            self._traffic(source, self._usual, reads=True) as get,
            self._traffic(sink, self._usual) as put,
        ):
            for x, y in halved(tuple(lo), tuple(hi), self._usual // item):
                shape = tuple(q - p for p, q in zip(x, y, strict=True))
                tile = shaped(self._buffers, "tile", shape, item)
                get.read(x, tile)
                self._put(put, x, tile, Op.COPY)

    def _feed(self, feed: Feed) -> None:
        """Write what a feed makes."""
        run = self._run
        size = min(COMPUTED_BYTES, self._cap)
        taking = Taking(run.sources[0], run.files, run.readers, self._buffers, tile_bytes=size)
        with ExitStack() as stack:
            puts = [
                stack.enter_context(self._traffic(side_of(run.target, r.placement), size))
                for r in feed.writes
            ]
            for number, at, tile in stack.enter_context(closing(feed.make(taking))):
                self._put(puts[number], at, tile, Op.ENCODE)
        if taking.overflowed:
            with run.lock:
                run.fed_overflowed.update(taking.overflowed)

    def _slab(self, slab: Slab, unit: Tiled) -> None:
        plan, run = self._plan, self._run
        entry = plan.entries[slab.entry]
        under = _under(plan.target_pieces, slab, slab.entry)
        sink = _side(run.target, entry.target, entry.target_tensor, plan.target_pieces, under)
        taken: Intake | PackedIntake | Reduction | None = None
        if entry.op is Op.FILL:
            size, tiles = self._usual, self._filled(entry, slab)
        else:
            size, taken = self._taken(slab, sink)
            tiles = taken.tiles(slab.lo, slab.hi)
        step = strides(entry.shape)
        digested = entry.op is not Op.FILL and run.digest is not DigestMode.NONE
        with closing(tiles), self._traffic(sink, size, sieve=unit.woven) as put:
            for at, tile in tiles:
                if digested:
                    offset = sum(i * s for i, s in zip(at, step, strict=True)) * tile.itemsize
                    run.digests.add(entry.canonical, offset, tile)
                self._put(put, at, tile, entry.op)
        if taken is not None and taken.overflowed:
            with run.lock:
                run.overflowed[slab.entry] += taken.overflowed

    def _taken(self, slab: Slab, sink: Side) -> tuple[int, Intake | PackedIntake | Reduction]:
        """The size of a slab's tiles, and what reads and converts them, and reduces if they are."""
        plan, run = self._plan, self._run
        target = plan.target_tensor(plan.entries[slab.entry]).dtype
        terms = plan.terms(slab.entry)
        reduces = plan.entries[slab.entry].op is Op.REDUCE
        kind = reduced_in(target) if reduces else target
        cap = run.memory_bytes // (SLOTS + 1) if reduces else self._cap
        sides: list[Side] = []
        cell = kind.itemsize
        for entry in (plan.entries[n] for n in terms):
            under = _under(plan.source_pieces, slab, terms[len(sides)])
            locator = run.sources[entry.source_index]
            sides.append(
                _side(locator, entry.source, entry.source_tensor, plan.source_pieces, under)
            )
            cell = max(cell, plan.source_dtype_bytes(entry))
        decodes = any(side.packed is not None for side in sides)
        usual = min(COMPUTED_BYTES, cap) if decodes else self._usual
        size = tile_bytes([*sides, sink], slab.lo, slab.hi, cell, usual, cap)
        intakes = [
            take_in(
                side,
                run.files,
                run.readers,
                self._buffers,
                source=plan.source_tensor(plan.entries[n]),
                target=kind,
                tile_bytes=size,
            )
            for n, side in zip(terms, sides, strict=True)
        ]
        if not reduces:
            return size, intakes[0]
        shares = [plan.entries[n].share for n in terms]
        reduction = Reduction(
            list(zip(shares, intakes, strict=True)),
            self._buffers,
            target=target,
            tile_bytes=size,
            cell_bytes=cell,
            depth=depth(plan, slab.entry),
        )
        return size, reduction

    def _filled(self, entry: Entry, slab: Slab) -> Tiles:
        target = self._plan.target_tensor(entry).dtype
        value = element(entry.fill, target)
        last: tuple[Index, Array] | None = None
        for a, b in cut(slab.lo, slab.hi, target.itemsize, self._usual):
            shape = tuple(y - x for x, y in zip(a, b, strict=True))
            if last is None or last[0] != shape:
                last = shape, shaped(self._buffers, "tile", shape, target.itemsize)
                last[1][...] = value[0]
            yield a, last[1]

    def _put(self, traffic: Traffic, at: Index, tile: Array, op: Op) -> None:
        if self._verify:
            self._differs |= traffic.repair(at, tile)
        else:
            traffic.write(at, tile)
        self._done[op] += tile.nbytes
        self._tell(tile.nbytes)

    def _traffic(
        self, side: Side, num_bytes: int, *, reads: bool = False, sieve: bool = False
    ) -> Traffic:
        run = self._run
        opened = run.readers if reads else run.writers
        scratch = self._buffers.take("scratch", num_bytes)
        return Traffic(side, run.files, opened, scratch, self._buffers, sieve=sieve or reads)


def _under(pieces: Pieces, slab: Slab, entry: int) -> list[int]:
    """Rows of an entry's pieces that share elements with a slab, which is of the same view."""
    of, n = pieces.of(entry), len(slab.lo)
    lo, hi = pieces.boxes.lo[of, :n], pieces.boxes.hi[of, :n]
    meets = ((lo < np.array(slab.hi, np.int64)) & (hi > np.array(slab.lo, np.int64))).all(axis=1)
    return [of.start + row for row in np.flatnonzero(meets).tolist()]


def _side(
    locator: Locator, placement: Placement | None, tensor: int, pieces: Pieces, rows: list[int]
) -> Side:
    if placement is None:
        raise ValueError("an entry with elements has a placement on either side")
    index = np.array(rows, np.int64)
    return locator.side(placement, tensor, pieces.shard[index], pieces.boxes[index])
