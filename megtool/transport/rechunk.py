"""The bytes of a checkpoint as other tensors, cut into other boxes.

The distributed optimizer stores flat buckets, Megatron's legacy format one file per rank. Both hold
row-major pieces of the model's tensors. Naming each piece gives a catalogue in model space over the
same bytes, for a checkpoint to read and for one to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.tensors.box import Boxes, Ints, concatenate
from megtool.tensors.catalogue import Catalogue, EncodedChunks, Extents, Replica, ShardOffsets
from megtool.tensors.grouping import grouped
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.transport.replicas import pair_replicas


@dataclass(frozen=True, slots=True)
class Rechunking:
    """New tensors, and the pieces of old shards that they consist of.

    Piece `i` is the box `boxes[i]` (padded to the widest tensor with `[0, 1)`) of `tensors[
    tensor[i]]`, stored in row-major order in shard `shard[i]` of the old catalogue, from its
    element `start[i]`. `copies` are duplicates of the box of another piece: they are compared by
    `verify` and never read.
    """

    tensors: Sequence[GlobalTensor]
    tensor: Ints
    boxes: Boxes
    shard: Ints
    start: Ints
    copies: NDArray[np.bool_]


def rechunk(catalogue: Catalogue, keep: Callable[[str], bool], rechunking: Rechunking) -> Catalogue:
    """The catalogue of the old tensors that `keep` accepts and the new ones, over the same bytes.

    Headers of shards are read if offsets depend on them.

    Raises:
        FormatError: a header is damaged.
    """
    chosen = np.array([keep(t.name) for t in catalogue.tensors], bool)
    s = catalogue.shards
    old = np.flatnonzero(chosen[s.tensor]) if len(s) else np.zeros(0, np.int64)
    first, second = _pieces(rechunking, ~rechunking.copies), _pieces(rechunking, rechunking.copies)
    rows = np.concatenate([old, first.shard])
    located = _locate(catalogue, rows)
    tensors = [t for t, c in zip(catalogue.tensors, chosen, strict=True) if c]
    every = [*tensors, *rechunking.tensors]
    ndim = widest(every)
    number = np.concatenate([(np.cumsum(chosen) - 1)[s.tensor[old]], len(tensors) + first.tensor])
    boxes = concatenate([s.boxes[old], first.boxes], ndim)
    item = np.array([t.dtype.itemsize for t in every], np.int64)[number]
    start = np.concatenate([np.zeros(len(old), np.int64), first.start])
    packed = np.array([t.packing is not None for t in every], bool)[number]
    length = np.where(packed, catalogue.extents.length[rows], boxes.volume() * item)
    order = np.argsort(number, kind="stable")
    strides = {k: v for k, v in located.strides.items() if k < len(old)}
    extents = Extents(
        file=catalogue.extents.file[rows][order],
        offset=(located.offset + start * item)[order],
        length=length[order],
        contained=bool(strides),
    )
    cells = catalogue.encoded_chunks
    return replace(
        catalogue,
        tensors=every,
        shards=Shards(
            number[order].astype(np.int32), boxes[order], s.owner[rows][order].astype(np.int32)
        ),
        extents=extents,
        replicas=[]
        if strides or cells
        else [
            *_keep_replicas(catalogue, old, order),
            *_replicas(catalogue, rechunking, first, second, order, len(old)),
        ],
        locate_contained=_make_locator(extents, strides, order) if strides else None,
        encoded_chunks=EncodedChunks(
            cells.mask[rows][order], lambda i: cells.read(int(rows[order[i]]))
        )
        if cells
        else None,
        _index={},
    )


def _pieces(r: Rechunking, chosen: NDArray[np.bool_]) -> Rechunking:
    rows = np.flatnonzero(chosen)
    return Rechunking(
        r.tensors, r.tensor[rows], r.boxes[rows], r.shard[rows], r.start[rows], r.copies[rows]
    )


def _locate(catalogue: Catalogue, rows: Ints) -> ShardOffsets:
    """Offsets of many shards, each located once."""
    if not catalogue.extents.contained:
        return ShardOffsets(offset=catalogue.extents.offset[rows])
    first, inverse = grouped(rows)
    offsets = catalogue.locate(rows[first])
    strides = {}
    if offsets.strides:
        strides = {
            k: offsets.strides[w] for k, w in enumerate(inverse.tolist()) if w in offsets.strides
        }
    return ShardOffsets(offset=offsets.offset[inverse], strides=strides)


def _make_locator(
    extents: Extents, strides: dict[int, tuple[int, ...]], order: Ints
) -> Callable[[NDArray[np.int64]], ShardOffsets]:
    """A locator for shards of which some are not row-major."""
    place = np.argsort(order)
    by_row = {int(place[k]): v for k, v in strides.items()}

    def locate(shards: NDArray[np.int64]) -> ShardOffsets:
        shard_strides = {k: by_row[r] for k, r in enumerate(shards.tolist()) if r in by_row}
        return ShardOffsets(offset=extents.offset[shards], strides=shard_strides)

    return locate


def _keep_replicas(catalogue: Catalogue, old: Ints, order: Ints) -> list[Replica]:
    """Replicas of the remaining old shards, by their new rows."""
    row = {
        int(s): int(k)
        for s, k in zip(old.tolist(), np.argsort(order)[: len(old)].tolist(), strict=True)
    }
    kept_replicas = [r for r in catalogue.replicas if r.shard in row]
    if not kept_replicas:
        return []
    copies = pair_replicas(replace(catalogue, replicas=kept_replicas))[1]
    offsets = copies.locate(np.arange(len(kept_replicas)))
    return [
        replace(
            r, shard=row[r.shard], offset=int(offsets.offset[k]), length=copies.tensors[k].num_bytes
        )
        for k, r in enumerate(kept_replicas)
        if k not in offsets.strides
    ]


def _replicas(
    catalogue: Catalogue,
    rechunking: Rechunking,
    first: Rechunking,
    second: Rechunking,
    order: Ints,
    num_old: int,
) -> list[Replica]:
    """Replicas by the new row of the piece with the same box."""
    if not len(second.tensor):
        return []
    place = np.argsort(order)
    row_by_key = {key: int(place[num_old + k]) for k, key in enumerate(_iter_keys(first))}
    offset = _locate(catalogue, second.shard).offset
    item = np.array([t.dtype.itemsize for t in rechunking.tensors], np.int64)[second.tensor]
    offset, length = offset + second.start * item, second.boxes.volume() * item
    out = []
    for k, key in enumerate(_iter_keys(second)):
        row = row_by_key.get(key)
        if row is not None:
            out.append(
                Replica(
                    shard=row,
                    file=int(catalogue.extents.file[second.shard[k]]),
                    offset=int(offset[k]),
                    length=int(length[k]),
                )
            )
    return out


def _iter_keys(pieces: Rechunking) -> Iterator[tuple[int, ...]]:
    boxes = zip(pieces.boxes.lo.tolist(), pieces.boxes.hi.tolist(), strict=True)
    for tensor, (lo, hi) in zip(pieces.tensor.tolist(), boxes, strict=True):
        yield (tensor, *lo, *hi)
