"""Builds a plan: joins source shards with target shards and proves that nothing is missing.

Pure: headers in, `ReshardPlan` out. No tensor data is read and nothing is written.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megtool.errors import CoverageError
from megtool.plan.copies import (
    CopySteps,
    DroppedItem,
    Fill,
    Op,
    PlanEntry,
    PlanSource,
    ReshardPlan,
    ShardPieces,
)
from megtool.plan.coverage import check_placements
from megtool.plan.entries import CopiedNames, View, build_entries, placement_view
from megtool.plan.work_units import choose_unit_size
from megtool.process.worker_identity import WorkerIdentity
from megtool.tensors.box import Boxes, Ints, concatenate, join, numel
from megtool.tensors.catalogue import Catalogue, Destination
from megtool.tensors.placement import Placement, pieces
from megtool.tensors.sharded import Shards

if TYPE_CHECKING:
    from megtool.transport.computed_tensors import TensorFeed


def build_plan(
    sources: Sequence[PlanSource],
    target: Destination,
    placements: Mapping[str, Placement],
    *,
    fills: Sequence[Fill] = (),
    dropped: Sequence[DroppedItem] = (),
    copies: Mapping[str, str] | None = None,
    parts: Mapping[str, Placement] | None = None,
    shares: Sequence[float] = (),
    feeds: Sequence[TensorFeed] = (),
    options: str = "",
    worker: WorkerIdentity | None = None,
) -> ReshardPlan:
    """Plan the copies that fill `target` from `sources`, and prove that nothing is missing.

    `placements` locate each canonical tensor in the target; the first source that places the tensor
    provides it. If the target stores a tensor several times (for example once per tensor-parallel
    rank), it has further names, which `copies` maps to the canonical one; of those that are a part
    of it, `parts` is the placement in the source. With `shares`, one per source, the target is
    their weighted sum: every source that places a float tensor adds to it.
    `feeds` fill what no placement does. `options` is part of the fingerprint, and so are the
    elements of all updates, which are read for it.
    The copies are those of the share of `worker` alone, unless that takes the plan of all: with
    feeds, and where tensors are written between others.

    Raises:
        MappingError: no source has a tensor that the target needs, or source and target
            placements do not agree, or an update does not fit its tensor.
        CoverageError: an element would be written twice or not at all, or a source tensor is
            neither used nor listed in `dropped`.
    """
    catalogues = tuple(s.catalogue for s in sources)
    copies = copies or {}
    copied = CopiedNames(copies, parts or {})
    entries = build_entries(sources, target.catalogue, placements, fills, copied, shares)
    width = max([len(e.shape) for e in entries], default=0)
    share = None
    if worker is not None and not feeds and not _has_interleaved(entries, catalogues, target):
        from megtool.plan.share import cut_share

        size = choose_unit_size(catalogues)
        share = cut_share(entries, catalogues, target.catalogue, worker, unit_bytes=size)
    own = None if share is None else share.entries.tolist()
    source_pieces = _locate_pieces(
        [(e.source_index, e.source_tensor, e.source) for e in entries], catalogues, width, own
    )
    target_pieces = _locate_pieces(
        [(0, e.target_tensor, e.target) for e in entries], [target.catalogue], width, own
    )
    plan = ReshardPlan(
        sources=catalogues,
        target=target,
        entries=entries,
        source_pieces=source_pieces,
        target_pieces=target_pieces,
        steps=_join_pieces(entries, source_pieces, target_pieces),
        dropped=list(dropped),
        feeds=tuple(feeds),
        share=share,
    )
    prove_coverage(plan, sources, placements, copies)
    if not plan.fills_memory:  # a load is never resumed
        plan.fingerprint = _fingerprint(plan, options)
    return plan


def _has_interleaved(
    entries: Sequence[PlanEntry], catalogues: Sequence[Catalogue], target: Destination
) -> bool:
    """Whether some entries are written in short runs between the bytes of others."""
    from megtool.plan.share import has_interleaved, is_surely_contiguous

    tensors, known = target.catalogue.tensors, dict[tuple[View, tuple[int, ...]], bool]()
    suspects = []
    for n, e in enumerate(entries):
        key = placement_view(e.target), tensors[e.target_tensor].shape
        if key not in known:
            known[key] = 0 in e.shape or is_surely_contiguous(e.target, key[1])
        if e.writes and not known[key]:
            suspects.append(n)
    if not suspects:
        return False
    width = max(len(e.shape) for e in entries)
    none = _locate_pieces([(0, 0, None) for _ in entries], catalogues, width)
    pieces = _locate_pieces(
        [(0, e.target_tensor, e.target) for e in entries], [target.catalogue], width, suspects
    )
    steps = _join_pieces([], none, none)
    plan = ReshardPlan(
        sources=tuple(catalogues),
        target=target,
        entries=list(entries),
        source_pieces=none,
        target_pieces=pieces,
        steps=steps,
        dropped=[],
    )
    return has_interleaved(plan, suspects)


def _locate_pieces(
    sides: Sequence[tuple[int, int, Placement | None]],
    catalogues: Sequence[Catalogue],
    width: int,
    own: Sequence[int] | None = None,
) -> ShardPieces:
    """The pieces of each entry, given as `(catalogue, tensor, placement)`, in shards.

    With `own`, only those entries have pieces.

    There are many entries and many shards, so one join matches the boxes that placements span in
    stored tensors with the boxes of shards. Placements that differ only in `base` (such as the
    experts of a layer) are then cut together, on shards shifted by it.
    """
    numbers_by_source: dict[int, list[int]] = defaultdict(list)
    for number in range(len(sides)) if own is None else own:
        index, _, p = sides[number]
        if p is not None and 0 not in p.shape:
            numbers_by_source[index].append(number)
    cut_pieces = [
        _cut_pieces(
            [(n, sides[n][1], p) for n in numbers if (p := sides[n][2])],
            catalogues[index],
            width,
            is_part=own is not None,
        )
        for index, numbers in numbers_by_source.items()
    ]
    entry = np.concatenate([np.zeros(0, np.int64), *(f[0] for f in cut_pieces)])
    shard = np.concatenate([np.zeros(0, np.int64), *(f[1] for f in cut_pieces)])
    boxes = concatenate([f[2] for f in cut_pieces], width)
    order = np.argsort(entry, kind="stable")
    return ShardPieces(
        entry[order].astype(np.int32),
        shard[order],
        boxes[order],
        np.searchsorted(entry[order], np.arange(len(sides) + 1)).astype(np.int64),
    )


def _cut_pieces(
    entries: Sequence[tuple[int, int, Placement]],
    catalogue: Catalogue,
    width: int,
    *,
    is_part: bool,
) -> tuple[Ints, Ints, Boxes]:
    """Pieces of entries `(number, tensor, placement)`: their numbers, shards and view boxes.

    With `is_part`, most shards have no piece, and are left out first.
    """
    shards = catalogue.shards
    ndim = shards.boxes.ndim
    number = np.array([e[0] for e in entries], np.int64)
    tensor = np.array([e[1] for e in entries], np.int64)
    base = np.array(
        [e[2].base + (0,) * (ndim - len(e[2].base)) for e in entries], np.int64
    ).reshape(len(entries), ndim)
    views: dict[View, int] = {}
    view = np.array([views.setdefault(placement_view(e[2]), len(views)) for e in entries], np.int64)
    reach = np.ones((len(views), ndim), np.int64)
    for (shape, dims, mults), row in views.items():
        for n, d, m in zip(shape, dims, mults, strict=True):
            reach[row, d] += (n - 1) * m
    spans = Boxes(base, base + reach[view])
    if is_part:
        near = _find_near(spans, tensor, shards)
        i, shard = join(spans, shards.boxes[near], tensor, shards.tensor[near].astype(np.int64))
        shard = near[shard]
    else:
        i, shard = join(spans, shards.boxes, tensor, shards.tensor.astype(np.int64))
    by_view = np.argsort(view[i], kind="stable")
    ends = np.searchsorted(view[i][by_view], np.arange(len(views) + 1))
    out: list[tuple[Ints, Ints, Boxes]] = []
    for (shape, dims, mults), row in views.items():
        rows = by_view[ends[row] : ends[row + 1]]
        p = Placement(
            canonical="", stored="", shape=shape, dims=dims, mults=mults, base=(0,) * ndim
        )
        boxes, shift = shards.boxes[shard[rows]], base[i[rows]]
        index, cut = pieces(p, Boxes(boxes.lo - shift, boxes.hi - shift))
        out.append((number[i[rows[index]]], shard[rows[index]], cut))
    return (
        np.concatenate([o[0] for o in out]),
        np.concatenate([o[1] for o in out]),
        concatenate([o[2] for o in out], width),
    )


def _find_near(spans: Boxes, tensor: Ints, shards: Shards) -> Ints:
    """Rows of the shards that meet the bounds of all spans in their tensor."""
    out = [np.zeros(0, np.int64)]
    order = np.argsort(tensor, kind="stable")
    ordered = tensor[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(order)])
    lo = np.minimum.reduceat(spans.lo[order], first) if len(order) else spans.lo
    hi = np.maximum.reduceat(spans.hi[order], first) if len(order) else spans.hi
    for row, number in enumerate(ordered[first].tolist()):
        of = shards.of(number)
        boxes = shards.boxes[of]
        is_near = ((boxes.lo < hi[row]) & (boxes.hi > lo[row])).all(axis=1)
        out.append(np.flatnonzero(is_near) + of.start)
    return np.concatenate(out)


def _join_pieces(
    entries: Sequence[PlanEntry], source: ShardPieces, target: ShardPieces
) -> CopySteps:
    """Join source and target pieces of each entry; fills come last and use their target pieces."""
    fills = sum(e.op is Op.FILL for e in entries)
    filled = np.arange(target.first[len(entries) - fills], len(target), dtype=np.int64)
    i, j = join(
        source.boxes, target.boxes, source.entry.astype(np.int64), target.entry.astype(np.int64)
    )
    lo = np.concatenate(
        [np.maximum(source.boxes.lo[i], target.boxes.lo[j]), target.boxes.lo[filled]]
    )
    hi = np.concatenate(
        [np.minimum(source.boxes.hi[i], target.boxes.hi[j]), target.boxes.hi[filled]]
    )
    target_piece = np.concatenate([j, filled])
    entry = target.entry[target_piece]
    return CopySteps(
        entry,
        np.concatenate([i, np.full(len(filled), -1, np.int64)]),
        target_piece,
        Boxes(lo, hi),
        np.searchsorted(entry, np.arange(len(entries) + 1)).astype(np.int64),
    )


def prove_coverage(
    plan: ReshardPlan,
    sources: Sequence[PlanSource],
    placements: Mapping[str, Placement],
    copies: Mapping[str, str],
) -> None:
    """Prove that every target element is written exactly once and no source tensor is forgotten.

    Shards tile their tensors on both sides (`Catalogue.check`), placements claim every element of
    a target tensor once and of a source tensor at most once (`check_placements`). So pieces, being
    images of disjoint shards under injective maps, are disjoint, and so are steps, their pairwise
    intersections: that each entry's steps add up to its volume is all that is left to check.

    Raises:
        CoverageError: the proof fails; it names the tensor.
        MappingError: a placement does not fit its stored tensor.
    """
    plan.target.catalogue.check()
    target_placements = list(placements.values()) + [
        e.target for e in plan.entries if e.op is Op.FILL
    ]
    target_placements += [region.placement for feed in plan.feeds for region in feed.writes]
    check_placements(plan.target.catalogue.tensors, target_placements, complete=True)
    written = np.concatenate([[0], np.cumsum(plan.steps.boxes.volume())])[plan.steps.first]
    counts = np.diff(written).tolist()
    own = range(len(counts)) if plan.share is None else plan.share.entries.tolist()
    for entry, n in ((plan.entries[number], counts[number]) for number in own):
        if n != numel(entry.shape):
            raise CoverageError(
                f"{n} of {numel(entry.shape)} elements of {entry.canonical!r} would be written",
                file=plan.sources[entry.source_index].root if entry.source_index >= 0 else None,
                tensor=entry.target.stored,
                hint="a shard of the source is missing or doubled",
            )
    excused = {d.name for d in plan.dropped}
    used = [set[str]() for _ in sources]
    for entry in plan.entries:
        if entry.source_index >= 0:
            used[entry.source_index].add(copies.get(entry.canonical, entry.canonical))
    if used:
        used[0].update(p.canonical for feed in plan.feeds for p in feed.reads)
    for source, names in zip(sources, used, strict=True):
        check_placements(source.catalogue.tensors, source.placements.values(), complete=False)
        placed = set()
        for name, p in source.placements.items():
            placed.add(p.stored)
            if name not in names and name not in excused and p.stored not in excused:
                raise CoverageError(
                    f"the source's {name!r} is neither used nor listed as dropped",
                    tensor=p.stored,
                )
        for tensor in source.catalogue.tensors:
            if tensor.name not in placed and tensor.name not in excused:
                raise CoverageError(
                    "the source tensor is neither used nor listed as dropped",
                    tensor=tensor.name,
                )


def _fingerprint(plan: ReshardPlan, options: str) -> str:
    """A hash of what must be equal to resume a run: sources, target, entries and options."""
    h = hashlib.sha256()

    def mix(*parts: object) -> None:
        text = repr(parts).encode()
        h.update(f"{len(text)}:".encode() + text)

    mix(options)
    for c in (*plan.sources, plan.target.catalogue):
        mix(str(c.root), c.format, c.files, c.extents.contained)
        if c.computed_identity is not None:
            mix(c.computed_identity())
        mix([(t.name, t.shape, t.dtype.name, t.packing) for t in c.tensors])
        s, e = c.shards, c.extents
        mix([(n, [p.to_plain() for p in parts]) for n, parts in c.packed.items()])
        for array in (s.tensor, s.boxes.lo, s.boxes.hi, e.file, e.offset, e.length):
            mix(array.shape)
            h.update(np.ascontiguousarray(array).data)
    fragments = plan.target.fragments
    mix(len(fragments))
    places = [x for number, offset, data in fragments for x in (number, offset, len(data))]
    h.update(np.array(places, np.int64).data)
    for start in range(
        0, len(fragments), 4096
    ):  # few calls, because there may be a million headers
        h.update(b"".join([data for _, _, data in fragments[start : start + 4096]]))
    for path, data in plan.target.iter_small_files():
        mix(path, len(data))
        h.update(data)
    for entry in plan.entries:
        a, b = entry.source, entry.target
        mix(
            (entry.canonical, entry.op.value, entry.source_index, entry.source_tensor),
            (entry.target_tensor, entry.fill, entry.shape, b.base, b.dims, b.mults, entry.shift),
            (entry.share, entry.adds_to),
            (a.base, a.dims, a.mults) if a else None,
            sorted(update.digest for update in entry.updates),
        )
    for feed in plan.feeds:
        mix([(p.canonical, p.stored, p.shape, p.base, p.dims, p.mults) for p in feed.reads])
        mix([(r.stored, r.lo, r.hi) for r in feed.writes], feed.identity)
    return h.hexdigest()
