"""Units of work: parts of a plan of some MiB, each executed, journaled and verified whole."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.plan.copies import PlanEntry, ReshardPlan
from megtool.storage.location.path import choose_by_latency
from megtool.tensors.box import Ints
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.grouping import distinct
from megtool.tensors.placement import lattice
from megtool.transport.shard_locator import ShardLocator, count_cuttable_dims
from megtool.transport.strided import SIEVE_RUN_BYTES, contiguous_run, sieve_run
from megtool.transport.tile import Index, split_box

UNIT_BYTES = 64 << 20
STORE_UNIT_BYTES = 16 << 20
"""Of units that read a store: a thread waits for each, so that even a small share needs several."""

MEMORY_UNIT_BYTES = 32 << 20
"""Of units that fill memory, which are never resumed: threads end at about the same time."""

MAX_SLABS = 4096
"""Entries in one unit, however small they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUnit:
    """Steps that the kernel copies, all into one file (or into tensors in memory).

    A long step is split into `parts` of `part_bytes`.
    """

    steps: Ints
    files: tuple[int, ...]
    offset: int
    num_bytes: int
    part: int = 0
    parts: int = 1
    part_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A box of an entry's view that is contiguous in row-major order."""

    entry: int
    lo: Index
    hi: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledUnit:
    """Slabs that go through memory.

    `interleaved` units read and rewrite gaps that belong to others, so they must run alone.
    """

    slabs: tuple[Slab, ...]
    files: tuple[int, ...]
    offset: int
    num_bytes: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedUnit:
    """Feeds of a plan, by number."""

    feeds: tuple[int, ...]
    files: tuple[int, ...]
    offset: int
    num_bytes: int


Unit = KernelUnit | TiledUnit | FeedUnit


def choose_unit_size(sources: Sequence[Catalogue]) -> int:
    """About the bytes of a unit, by what is read."""
    sizes = (choose_by_latency(c.root, UNIT_BYTES, STORE_UNIT_BYTES) for c in sources)
    return min([UNIT_BYTES, *sizes])


def plan_units(
    plan: ReshardPlan,
    target: ShardLocator,
    *,
    tiled_only: bool = False,
    entries: NDArray[np.bool_] | None = None,
) -> list[Unit]:
    """Split a plan into units; the same plan gives the same list, in order of destination.

    Entries whose steps are all plain (see `ReshardPlan.step_runs`) are copied by the kernel, all
    others go through tiles; with `tiled_only` all do. Interleaved units come last. `entries`
    selects those of which units are planned, without feeds.
    """
    steps, unit_bytes = plan.steps, choose_unit_size(plan.sources)
    if plan.fills_memory:
        unit_bytes = min(unit_bytes, MEMORY_UNIT_BYTES)
    _, is_plain = plan.step_runs()
    is_tiled = np.zeros(len(plan.entries), bool)
    is_tiled[steps.entry[~is_plain]] = True
    if tiled_only:
        is_tiled[:] = True
    is_plain = ~is_tiled[steps.entry]
    if entries is not None:
        is_plain, is_tiled = is_plain & entries[steps.entry], is_tiled & entries
    planned: list[Unit] = list(_kernel_units(plan, target, np.flatnonzero(is_plain), unit_bytes))
    tiled = [n for n in np.flatnonzero(is_tiled).tolist() if plan.entries[n].writes]
    planned += _tiled_units(plan, target, tiled, unit_bytes)
    if entries is None:
        planned += _feed_units(plan, target, unit_bytes)
    return order_units(planned)


def order_units(units: Sequence[Unit]) -> list[Unit]:
    """Units in order of destination, interleaved ones last."""

    def place(unit: Unit) -> tuple[bool, int, int]:
        return isinstance(unit, TiledUnit) and unit.interleaved, unit.files[0], unit.offset

    return sorted(units, key=place)


def _kernel_units(
    plan: ReshardPlan, target: ShardLocator, rows: Ints, unit_bytes: int
) -> Iterator[KernelUnit]:
    if not len(rows):
        return
    steps, catalogue = plan.steps, target.catalogue
    piece = steps.target_piece[rows]
    shard = plan.target_pieces.shard[piece]
    base, _ = plan.target_lattice(piece, steps.boxes.lo[rows])
    item = np.array([plan.target_tensor(e).dtype.itemsize for e in plan.entries], np.int64)
    item = item[steps.entry[rows]]
    offset = target.offsets(shard) + base * item
    size = steps.boxes.volume()[rows] * item
    file = catalogue.extents.file[shard]
    order = _source_order(plan, rows) if plan.fills_memory else np.lexsort((offset, file))
    rows, offset, size, file = rows[order], offset[order], size[order], file[order]
    before = np.cumsum(size) - size
    is_large = size > unit_bytes
    is_same_unit = ~is_large[1:] & ~is_large[:-1]
    if not plan.fills_memory:
        is_same_unit &= file[1:] == file[:-1]
    is_same_unit &= before[1:] // unit_bytes == before[:-1] // unit_bytes
    first = np.flatnonzero(np.concatenate([[True], ~is_same_unit]))
    total = np.add.reduceat(size, first).tolist()
    last = [*first[1:].tolist(), len(rows)]
    for a, b, num_bytes in zip(first.tolist(), last, total, strict=True):
        parts = max(1, -(-num_bytes // unit_bytes)) if b == a + 1 else 1
        for part in range(parts):
            rest = num_bytes - part * unit_bytes
            yield KernelUnit(
                steps=rows[a:b],
                files=tuple(distinct(file[a:b]).tolist()),
                offset=int(offset[a]) + part * unit_bytes,
                num_bytes=min(unit_bytes, rest) if parts > 1 else num_bytes,
                part=part,
                parts=parts,
                part_bytes=unit_bytes,
            )


def _source_order(plan: ReshardPlan, rows: Ints) -> Ints:
    """The order in which the shards of steps lie in the files of the sources."""
    steps = plan.steps
    index = np.array([e.source_index for e in plan.entries], np.int64)[steps.entry[rows]]
    shard = plan.source_pieces.shard[steps.source_piece[rows]]
    file, offset = np.zeros_like(shard), np.zeros_like(shard)
    for source in distinct(index).tolist():
        mask, extents = index == source, plan.sources[source].extents
        file[mask], offset[mask] = extents.file[shard[mask]], extents.offset[shard[mask]]
    return np.lexsort((offset, file, index))


def _tiled_units(
    plan: ReshardPlan, target: ShardLocator, entries: Sequence[int], unit_bytes: int
) -> Iterator[TiledUnit]:
    """Slabs in order of destination; small entries of a file that are close share a unit."""
    pending: dict[tuple[int, bool], list[TiledUnit]] = defaultdict(list)
    total: dict[tuple[int, bool], int] = defaultdict(int)
    slabs: list[TiledUnit] = []
    for number in entries:
        slabs += _split_entry(plan, target, number, unit_bytes)
    slabs.sort(key=lambda u: (u.files[0], u.offset))
    for unit in slabs:
        if unit.num_bytes >= unit_bytes // 2:
            yield unit
            continue
        key = unit.files[0], unit.interleaved
        if pending[key] and unit.offset - pending[key][0].offset > unit_bytes:
            yield _merge_tiled(pending.pop(key))
            del total[key]
        pending[key].append(unit)
        total[key] += unit.num_bytes
        if total[key] >= unit_bytes or len(pending[key]) >= MAX_SLABS:
            yield _merge_tiled(pending.pop(key))
            del total[key]
    for batch in pending.values():
        yield _merge_tiled(batch)


def _merge_tiled(batch: Sequence[TiledUnit]) -> TiledUnit:
    return TiledUnit(
        slabs=tuple(s for u in batch for s in u.slabs),
        files=tuple(sorted({f for u in batch for f in u.files})),
        offset=batch[0].offset,
        num_bytes=sum(u.num_bytes for u in batch),
        interleaved=batch[0].interleaved,
    )


def _split_entry(
    plan: ReshardPlan, target: ShardLocator, number: int, unit_bytes: int
) -> Iterator[TiledUnit]:
    entry, pieces = plan.entries[number], plan.target_pieces
    of, n = pieces.of(number), len(entry.shape)
    lo, hi = pieces.boxes.lo[of, :n], pieces.boxes.hi[of, :n]
    shard = pieces.shard[of]
    if not len(shard):
        return
    file = target.catalogue.extents.file[shard]
    offset = target.offsets(shard)
    interleaved = is_interleaved(plan, entry, of, target)
    item = plan.target_tensor(entry).dtype.itemsize
    for a, b in split_box((0,) * n, entry.shape, item, unit_bytes, depth=cut_depth(plan, number)):
        under = ((lo < np.array(b)) & (hi > np.array(a))).all(axis=1)
        files = distinct(file[under])
        first = np.flatnonzero(under & (file == files[0]))
        begin = offset[first]
        if any(a):
            boxes = pieces.boxes.lo[of][first]
            boxes[:, :n] = np.maximum(boxes[:, :n], np.array(a))
            begin = begin + plan.target_lattice(of.start + first, boxes)[0] * item
        volume = 1
        for x, y in zip(a, b, strict=True):
            volume *= y - x
        yield TiledUnit(
            slabs=(Slab(entry=number, lo=a, hi=b),),
            files=tuple(files.tolist()),
            offset=int(begin.min()),
            num_bytes=volume * item,
            interleaved=interleaved,
        )


def _feed_units(plan: ReshardPlan, target: ShardLocator, unit_bytes: int) -> Iterator[FeedUnit]:
    """Units of feeds, in order; small feeds of one file share a unit."""
    catalogue = target.catalogue
    pending: list[FeedUnit] = []
    for number, feed in enumerate(plan.feeds):
        shard_ranges = [catalogue.shards.of(catalogue.index[r.stored]) for r in feed.writes]
        files = {int(f) for of in shard_ranges for f in catalogue.extents.file[of].tolist()}
        first = np.array([of.start for of in shard_ranges], np.int64)
        unit = FeedUnit(
            feeds=(number,),
            files=tuple(sorted(files)),
            offset=int(target.offsets(first[:1])[0]),
            num_bytes=feed.num_bytes,
        )
        is_full = sum(u.num_bytes for u in pending) + unit.num_bytes > unit_bytes
        if pending and (is_full or pending[0].files != unit.files or len(pending) >= MAX_SLABS):
            yield _merge_feeds(pending)
            pending = []
        pending.append(unit)
    if pending:
        yield _merge_feeds(pending)


def _merge_feeds(batch: Sequence[FeedUnit]) -> FeedUnit:
    return FeedUnit(
        feeds=tuple(n for u in batch for n in u.feeds),
        files=batch[0].files,
        offset=batch[0].offset,
        num_bytes=sum(u.num_bytes for u in batch),
    )


def cut_depth(plan: ReshardPlan, number: int) -> int:
    """The number of leading view dimensions that may be cut: not those inside packed rows."""
    return find_cut_depth([plan.entries[term] for term in plan.terms(number)], plan.sources)


def find_cut_depth(terms: Sequence[PlanEntry], sources: Sequence[Catalogue]) -> int:
    """See `cut_depth`; `terms` are the entries that an entry is computed from."""
    return min(
        len(e.shape)
        if e.source is None
        else count_cuttable_dims(e.source, sources[e.source_index].tensors[e.source_tensor])
        for e in terms
    )


def is_interleaved(plan: ReshardPlan, entry: PlanEntry, of: slice, target: ShardLocator) -> bool:
    """Whether the largest piece is written in short runs that are close together."""
    pieces, n = plan.target_pieces, len(entry.shape)
    row = of.start + int(pieces.boxes[of].volume().argmax())
    shard = target.catalogue.shards.boxes[pieces.shard[row : row + 1]]
    _, stride = lattice(entry.target, shard.lo, shard.hi, pieces.boxes.lo[row : row + 1, :n])
    item = plan.target_tensor(entry).dtype.itemsize
    size = (pieces.boxes.hi[row, :n] - pieces.boxes.lo[row, :n]).tolist()
    step = (stride[0] * item).tolist()
    dims = sorted((d for d in range(n) if size[d] > 1), key=lambda d: -step[d])
    sizes, steps = [size[d] for d in dims], [step[d] for d in dims]
    run, outer = contiguous_run(sizes, steps, item)
    return run < SIEVE_RUN_BYTES and sieve_run(sizes, steps, run, outer)[1] < outer


class UnitSchedule:
    """Assigns units to threads so that two threads rarely write to one file. Thread-safe.

    File systems let one thread at a time write to a file, so parallelism comes from different
    files. Units of one file come in ascending order, which suits disks and read-ahead.
    """

    def __init__(self, units: Sequence[tuple[int, Unit]]) -> None:
        self._queues: dict[int, deque[tuple[int, Unit]]] = defaultdict(deque)
        for number, unit in units:
            self._queues[unit.files[0]].append((number, unit))
        self._busy: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def take(self) -> tuple[int, Unit] | None:
        """The next unit and its number; None if there are no more."""
        with self._lock:
            best, least = None, 1 << 62
            for file, queue in self._queues.items():
                most = max(self._busy[f] for f in queue[0][1].files)
                if most < least:
                    best, least = file, most
                if not most:
                    break
            if best is None:
                return None
            number, unit = self._queues[best].popleft()
            if not self._queues[best]:
                del self._queues[best]
            for f in unit.files:
                self._busy[f] += 1
            return number, unit

    def release(self, unit: Unit) -> None:
        """Mark a unit as done."""
        with self._lock:
            for f in unit.files:
                self._busy[f] -= 1
