"""The part of a plan that one worker does, found before its copies are planned.

Every worker knows all entries of a plan, and where each begins in the target. It takes a range of
the target's bytes, and plans copies for the entries in it alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megtool.plan.copies import PlanEntry, PlanShare, ReshardPlan
from megtool.plan.work_units import (
    KernelUnit,
    TiledUnit,
    Unit,
    find_cut_depth,
    is_interleaved,
    order_units,
    plan_units,
)
from megtool.process.worker_identity import WorkerIdentity
from megtool.tensors.box import Boxes, Ints, join, numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.grouping import grouped
from megtool.tensors.placement import Placement
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.tile import split_box


def cut_share(
    entries: Sequence[PlanEntry],
    sources: Sequence[Catalogue],
    target: Catalogue,
    worker: WorkerIdentity,
    *,
    unit_bytes: int,
) -> PlanShare:
    """The share of a worker: all workers together have every byte once, and about as many each."""
    item = [t.dtype.itemsize for t in target.tensors]
    size = np.array([numel(e.shape) * item[e.target_tensor] * e.writes for e in entries], np.int64)
    file, offset = _find_begins(entries, target)
    like = _find_copies(entries)
    order = np.lexsort((np.arange(len(entries)), like, offset[like], file[like]))
    order = order[size[order] > 0]
    if not len(order):
        return PlanShare(begin=0, end=0, entries=np.array([], np.int64), divided={})
    ends = np.cumsum(size[order])
    total = int(ends[-1])
    begin, end = (total * n // worker.count for n in (worker.index, worker.index + 1))
    first = ends - size[order]
    is_large = size[order] > unit_bytes
    place = np.stack([file[like], offset[like]])[:, order]
    group = np.cumsum((np.diff(place, prepend=-1) != 0).any(axis=0)) - 1
    begins, stops = grouped(group)[0], np.append(group[1:] != group[:-1], True)
    group_first, group_end = first[begins][group], ends[np.flatnonzero(stops)][group]
    is_group = group_end - group_first <= unit_bytes
    middle = np.where(is_group, (group_first + group_end) // 2, first + size[order] // 2)
    is_own = np.where(is_large, (first < end) & (ends > begin), (middle >= begin) & (middle < end))
    is_divided = is_own & is_large & ((first < begin) | (ends > end))
    writers = set(order[is_own].tolist())
    terms = [n for n, e in enumerate(entries) if n in writers or e.adds_to in writers]
    borders = []
    for mark in (total * n // worker.count for n in range(1, worker.count)):
        row, before = int(np.searchsorted(ends, mark, "right")), 0
        if row < len(order) and is_large[row] and first[row] < mark:
            number = int(order[row])
            terms_of = [e for n, e in enumerate(entries) if n == number or e.adds_to == number]
            before = _count_before(
                terms_of[0].shape,
                item[terms_of[0].target_tensor],
                unit_bytes,
                mark - int(first[row]),
                depth=find_cut_depth(terms_of, sources),
            )
            if before == size[order[row]]:
                row, before = row + 1, 0
        while row < len(order) and not is_large[row] and middle[row] < mark:
            row += 1
        if row < len(order):
            together = group == group[row] if is_group[row] else [row]
            borders += [(n, before) for n in order[together].tolist()]
    return PlanShare(
        begin=begin,
        end=end,
        entries=np.array(terms, np.int64),
        divided=dict(zip(order[is_divided].tolist(), first[is_divided].tolist(), strict=True)),
        borders=tuple(borders),
    )


def _find_copies(entries: Sequence[PlanEntry]) -> Ints:
    """For each entry, the first one that reads the same."""
    first: dict[tuple[int, int, Placement], int] = {}
    return np.array(
        [
            n
            if e.source is None
            else first.setdefault((e.source_index, e.source_tensor, e.source), n)
            for n, e in enumerate(entries)
        ],
        np.int64,
    )


def _count_before(
    shape: tuple[int, ...], cell: int, unit_bytes: int, mark: int, *, depth: int
) -> int:
    """Bytes of a large entry in units whose middle is before `mark`; see `cut_depth`."""
    done = 0
    for lo, hi in split_box((0,) * len(shape), shape, cell, unit_bytes, depth=depth):
        size = cell * math.prod(b - a for a, b in zip(lo, hi, strict=True))
        if done + size // 2 >= mark:
            break
        done += size
    return done


def _find_begins(entries: Sequence[PlanEntry], target: Catalogue) -> tuple[Ints, Ints]:
    """File and offset of the shard of each entry's first element; 0 for those without elements."""
    shards, ndim = target.shards, target.shards.boxes.ndim
    numbers = np.array([n for n, e in enumerate(entries) if 0 not in e.shape], np.int64)
    placed = [entries[n] for n in numbers.tolist()]
    base = np.array(
        [e.target.base + (0,) * (ndim - len(e.target.base)) for e in placed], np.int64
    ).reshape(len(placed), ndim)
    tensor = np.array([e.target_tensor for e in placed], np.int64)
    i, shard = join(Boxes(base, base + 1), shards.boxes, tensor, shards.tensor.astype(np.int64))
    file, offset = np.zeros(len(entries), np.int64), np.zeros(len(entries), np.int64)
    file[numbers[i]] = target.extents.file[shard]
    offset[numbers[i]] = target.extents.offset[shard]
    return file, offset


def is_surely_contiguous(placement: Placement, shape: tuple[int, ...]) -> bool:
    """Whether every shard, however a tensor of this shape is cut, has a placement in one run.

    That is so for whole tensors, and ranges of the first dimension in which one is not whole.
    """
    extents = [1] * len(shape)
    last = -1
    for n, d, m in zip(placement.shape, placement.dims, placement.mults, strict=True):
        if n == 1:
            continue
        if m != 1 or d <= last:
            return False
        extents[d], last = n, d
    partial = [d for d, (n, m) in enumerate(zip(extents, shape, strict=True)) if n != m]
    return all(extents[d] == 1 for d in range(max(partial, default=0)))


def has_interleaved(plan: ReshardPlan, numbers: Sequence[int]) -> bool:
    """Whether any of some entries, whose target pieces are planned, is written between others."""
    target = ShardLocator(plan.target.catalogue)
    return any(
        is_interleaved(plan, plan.entries[n], of, target)
        for n in numbers
        if (of := plan.target_pieces.of(n)).start < of.stop
    )


def plan_share_units(plan: ReshardPlan, target: ShardLocator, *, tiled_only: bool) -> list[Unit]:
    """The units of the share that a plan is for, in order of destination."""
    share = plan.share
    if share is None:
        raise ValueError("the plan is of everything")
    whole = np.zeros(len(plan.entries), bool)
    whole[share.entries] = True
    out: list[Unit] = []
    for number, first in share.divided.items():
        terms = plan.terms(number)
        whole[terms] = False
        alone = np.zeros(len(plan.entries), bool)
        alone[terms] = True
        for unit in plan_units(plan, target, tiled_only=tiled_only, entries=alone):
            if share.begin <= first + unit.num_bytes // 2 < share.end:
                out.append(unit)
            first += unit.num_bytes
    return order_units([*out, *plan_units(plan, target, tiled_only=tiled_only, entries=whole)])


def count_file_bytes(
    plan: ReshardPlan, target: ShardLocator, units: Sequence[Unit]
) -> dict[int, int]:
    """Bytes of tensors that units write, by number of the file."""
    out: dict[int, int] = {}
    pieces, files = plan.target_pieces, target.catalogue.extents.file
    for unit in units:
        if len(unit.files) == 1 or isinstance(unit, KernelUnit):
            out[unit.files[0]] = out.get(unit.files[0], 0) + unit.num_bytes
            continue
        for slab in unit.slabs if isinstance(unit, TiledUnit) else ():
            of, n = pieces.of(slab.entry), len(slab.lo)
            item = plan.target_tensor(plan.entries[slab.entry]).dtype.itemsize
            lo = np.maximum(pieces.boxes.lo[of, :n], np.array(slab.lo, np.int64))
            hi = np.minimum(pieces.boxes.hi[of, :n], np.array(slab.hi, np.int64))
            size = Boxes(lo, hi).volume() * item
            for file, num_bytes in zip(
                files[pieces.shard[of]].tolist(), size.tolist(), strict=True
            ):
                out[file] = out.get(file, 0) + num_bytes
    return {file: num_bytes for file, num_bytes in out.items() if num_bytes}


def expected_file_bytes(target: Catalogue) -> NDArray[np.int64]:
    """Bytes of tensors in every file of a target."""
    item = np.array([t.dtype.itemsize for t in target.tensors], np.int64)
    size = target.shards.boxes.volume() * item[target.shards.tensor]
    out = np.zeros(len(target.files), np.int64)
    np.add.at(out, target.extents.file, size)
    return out
