"""The plan of a reshard: every copy as columns of n-d boxes.

A plan is data. `planner.build_plan` computes it from headers, `execute.execute` executes it. It is
independent of models and formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.tensors.box import Boxes, Ints, row_major_strides
from megtool.tensors.catalogue import IN_MEMORY, Catalogue, Destination
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from megtool.transport.computed_tensors import TensorFeed
    from megtool.transport.weight_update import WeightUpdate

KERNEL_RUN_BYTES = 64 * 1024
"""Common runs of at least this many bytes are moved by the kernel, shorter ones by tiles."""

MEMORY_RUN_BYTES = 512
"""Of what lies in one run of a file, runs of memory of at least this size are filled directly."""


class Op(StrEnum):
    """What happens to elements between source and target."""

    COPY = "copy"
    CAST = "cast"
    DECODE = "decode"
    FILL = "fill"
    REDUCE = "reduce"
    ENCODE = "encode"
    MERGE = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """A checkpoint to read, the placements of its canonical tensors, and what is added to some."""

    catalogue: Catalogue
    placements: Mapping[str, Placement]
    updates: Mapping[str, Sequence[WeightUpdate]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A box of a target tensor that no source stores, such as vocabulary padding."""

    stored: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedItem:
    """A source tensor or object that the target does not store, and the reason.

    `is_lost` is false if no information is lost: an empty object, or a copy of another tensor.
    """

    name: str
    reason: str
    num_bytes: int = 0
    is_lost: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One canonical tensor to write, over a view that source and target share.

    Row-major order of `shape` is row-major order of the canonical tensor. Indices count into the
    tensors of source number `source_index` and of the target; fills have no source (-1).

    A reduction is one entry per source, in order: the first writes the sum of all, each times its
    `share`, and the others have its number in `adds_to`, which is -1 for entries that write. A
    merge adds `updates` to the source's elements.
    """

    canonical: str
    op: Op
    shape: tuple[int, ...]
    source_index: int
    source_tensor: int
    target_tensor: int
    source: Placement | None
    target: Placement
    fill: float = 0.0
    share: float = 1.0
    adds_to: int = -1
    updates: tuple[WeightUpdate, ...] = ()

    @property
    def shift(self) -> float:
        """What is added to the source's stored elements to make the target's."""
        return self.target.shift - (self.source.shift if self.source else 0.0)

    @property
    def writes(self) -> bool:
        """Whether this entry writes its elements, instead of adding to another entry."""
        return self.adds_to < 0


@dataclass(frozen=True, slots=True)
class ShardPieces:
    """The parts of entries that shards hold, in view space, grouped by entry.

    Boxes are padded to the widest view with `[0, 1)`; `shard` is a row of the catalogue's shards.
    """

    entry: NDArray[np.int32]
    shard: Ints
    boxes: Boxes
    first: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def of(self, entry: int) -> slice:
        """Rows of one entry."""
        return slice(int(self.first[entry]), int(self.first[entry + 1]))


@dataclass(frozen=True, slots=True)
class CopySteps:
    """N-d copies: the box of an entry that one source piece gives to one target piece.

    `source_piece` is -1 for fills.
    """

    entry: NDArray[np.int32]
    source_piece: Ints
    target_piece: Ints
    boxes: Boxes
    first: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def of(self, entry: int) -> slice:
        """Rows of one entry."""
        return slice(int(self.first[entry]), int(self.first[entry + 1]))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The placements of one side in columns.

    `dims` and `mults` are int64 `[entries, view]`, `base` is int64 `[entries, stored]`.
    """

    dims: Ints
    mults: Ints
    base: Ints

    @classmethod
    def of(cls, placements: Sequence[Placement | None], view: int, stored: int) -> _Columns:
        dims = np.zeros((len(placements), view), np.int64)
        mults = np.zeros((len(placements), view), np.int64)
        base = np.zeros((len(placements), stored), np.int64)
        for row, p in enumerate(placements):
            if p is not None:
                dims[row, : len(p.dims)] = p.dims
                mults[row, : len(p.mults)] = p.mults
                base[row, : len(p.base)] = p.base
        return cls(dims, mults, base)

    def lattice(self, entry: Ints, lo: Ints, hi: Ints, view_lo: Ints) -> tuple[Ints, Ints]:
        step = row_major_strides(hi - lo)
        if not step.shape[1]:
            return np.zeros(len(entry), np.int64), np.zeros(view_lo.shape, np.int64)
        stride = self.mults[entry] * np.take_along_axis(step, self.dims[entry], axis=1)
        start = ((self.base[entry] - lo) * step).sum(axis=1) + (view_lo * stride).sum(axis=1)
        return start, stride


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShare:
    """The entries of which a worker writes elements, and the bytes that they take.

    All bytes of a target are in the order of their entries: by the file and the offset at which
    each begins, and copies of a tensor beside each other. A worker has those from `begin` to `end`.
    An entry of at most a unit belongs to the worker that has its middle, or that of all its copies
    and all that begin with it; of a larger one, each worker does the units whose middle it has.
    `entries` are numbers, ascending, with all terms of a reduction. `divided` maps those that other
    workers take part in to their first byte in the order. `borders` are where the shares of all
    workers but the first begin: entries, and how many of their bytes are another worker's.
    """

    begin: int
    end: int
    entries: Ints
    divided: dict[int, int]
    borders: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, kw_only=True)
class ReshardPlan:
    """Sources, target and the copy steps between them; `feeds` compute the other tensors.

    With `share`, pieces and steps are those of its entries alone, the rest is of everything.
    """

    sources: tuple[Catalogue, ...]
    target: Destination
    entries: list[PlanEntry]
    source_pieces: ShardPieces
    target_pieces: ShardPieces
    steps: CopySteps
    dropped: list[DroppedItem]
    feeds: tuple[TensorFeed, ...] = ()
    fingerprint: str = ""
    share: PlanShare | None = None
    _sides: dict[str, _Columns] = field(default_factory=dict, repr=False)

    @property
    def fills_memory(self) -> bool:
        """Whether the target is memory of this process."""
        return self.target.catalogue.format == IN_MEMORY

    def source_lattice(self, piece: Ints, view_lo: Ints) -> tuple[Ints, Ints]:
        """Element position inside the shard and stride per view dimension, for view boxes that
        start at `view_lo` (int64 `[n, view]`) inside the given source pieces (all of one source).
        """
        entry = self.source_pieces.entry[piece].astype(np.int64)
        index = self.entries[int(entry[0])].source_index if len(entry) else 0
        shards = self.sources[index].shards.boxes
        rows = self.source_pieces.shard[piece]
        columns = self._columns("source", max(c.shards.boxes.ndim for c in self.sources))
        width = shards.ndim
        narrow = _Columns(columns.dims, columns.mults, columns.base[:, :width])
        return narrow.lattice(entry, shards.lo[rows], shards.hi[rows], view_lo)

    def target_lattice(self, piece: Ints, view_lo: Ints) -> tuple[Ints, Ints]:
        """Like `source_lattice`, for target pieces."""
        entry = self.target_pieces.entry[piece].astype(np.int64)
        shards = self.target.catalogue.shards.boxes
        rows = self.target_pieces.shard[piece]
        columns = self._columns("target", shards.ndim)
        return columns.lattice(entry, shards.lo[rows], shards.hi[rows], view_lo)

    def _columns(self, side: str, stored: int) -> _Columns:
        if side not in self._sides:
            placements = [e.source if side == "source" else e.target for e in self.entries]
            self._sides[side] = _Columns.of(placements, self.steps.boxes.ndim, stored)
        return self._sides[side]

    def terms(self, number: int) -> list[int]:
        """The entries that entry `number` is computed from: one per source of a reduction."""
        if self.entries[number].op is not Op.REDUCE:
            return [number]
        end = number + 1
        while end < len(self.entries) and self.entries[end].adds_to == number:
            end += 1
        return list(range(number, end))

    def source_dtype_bytes(self, entry: PlanEntry) -> int:
        """Bytes per element of an entry's source (of the target for fills)."""
        if entry.source_index < 0:
            return self.target_tensor(entry).dtype.itemsize
        return self.source_tensor(entry).dtype.itemsize

    def source_tensor(self, entry: PlanEntry) -> GlobalTensor:
        """The stored tensor an entry is read from."""
        return self.sources[entry.source_index].tensors[entry.source_tensor]

    def target_tensor(self, entry: PlanEntry) -> GlobalTensor:
        """The stored tensor an entry is written to."""
        return self.target.catalogue.tensors[entry.target_tensor]

    def step_runs(self) -> tuple[Ints, NDArray[np.bool_]]:
        """Bytes (in the target) of each step's common runs, and which steps are plain.

        A plain step is a copy whose runs are long on both sides, so the kernel can move them; one
        into memory may fill shorter ones with a run of the source.
        """
        n, steps = len(self.steps), self.steps
        run, is_plain = np.zeros(n, np.int64), np.zeros(n, bool)
        copies = np.array([e.op is Op.COPY for e in self.entries], bool)[steps.entry]
        item = np.array([self.target_tensor(e).dtype.itemsize for e in self.entries], np.int64)
        filled = steps.source_piece < 0
        run[filled] = (steps.boxes.volume() * item[steps.entry])[filled]
        index = np.array([e.source_index for e in self.entries], np.int64)[steps.entry]
        for source in range(len(self.sources)):
            rows = np.flatnonzero(index == source)
            lo, shape = steps.boxes.lo[rows], steps.boxes.shape[rows]
            _, a = self.source_lattice(steps.source_piece[rows], lo)
            _, b = self.target_lattice(steps.target_piece[rows], lo)
            elements, is_single_run = common_runs(shape, a, b)
            run[rows] = elements * item[steps.entry[rows]]
            is_long = run[rows] >= KERNEL_RUN_BYTES
            if self.fills_memory:
                is_long |= common_runs(shape, a, a)[1] & (run[rows] >= MEMORY_RUN_BYTES)
            is_plain[rows] = copies[rows] & (is_single_run | is_long)
        return run, is_plain


def common_runs(shape: Ints, a: Ints, b: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Elements in the longest runs contiguous on both sides, and whether one run is all.

    `shape`, `a` and `b` (strides of the two sides) are int64 `[n, ndim]`.
    """
    run = np.ones(len(shape), np.int64)
    is_contiguous = np.ones(len(shape), bool)
    for d in range(shape.shape[1] - 1, -1, -1):
        is_single = shape[:, d] == 1
        is_contiguous &= is_single | ((a[:, d] == run) & (b[:, d] == run))
        run = np.where(is_contiguous & ~is_single, run * shape[:, d], run)
    return run, is_contiguous
