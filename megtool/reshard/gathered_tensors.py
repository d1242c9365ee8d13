"""Tensors gathered from rows and columns of stored ones, as shards that are read whole.

What stays of a tensor when indices are left out has no affine place in a file. So it is cut into
blocks of whole rows of a few megabytes, and each block is a shard that `EncodedChunks` reads: it
goes through the same plan, digests and proofs as any other, whatever is written from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue, EncodedChunks, Extents, ShardOffsets
from megtool.checkpoint.computed_tensors import RegionReader
from megtool.checkpoint.read import CheckpointReader
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.transport.strided import Array, Buffers
from megtool.tensors.box import Boxes, concatenate, numel
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards

BLOCK_BYTES = 4 << 20
"""Rows are read, and shards are made, in blocks of at most about this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTensor:
    """A tensor `name` of the elements that stay of the canonical one at `placement`.

    `shape` is the canonical tensor's, and `indices` are, by dimension, the ones that stay (None:
    all). Elements keep the stored dtype and bits.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...]
    indices: tuple[NDArray[np.int64] | None, ...]

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape of what stays."""
        return tuple(
            n if indices is None else len(indices)
            for n, indices in zip(self.shape, self.indices, strict=True)
        )


def with_gathered(
    catalogue: Catalogue, removed: frozenset[str], gathered: Sequence[GatheredTensor]
) -> Catalogue:
    """The catalogue without the stored tensors in `removed`, and with gathered ones instead."""
    others = catalogue.select(lambda name: name not in removed)
    blocks = [
        (number, lo, hi)
        for number, tensor in enumerate(gathered)
        for lo, hi in _row_blocks(tensor, catalogue[tensor.placement.stored].dtype.itemsize)
    ]
    tensors = [
        GlobalTensor(name=t.name, shape=t.new_shape, dtype=catalogue[t.placement.stored].dtype)
        for t in gathered
    ]
    ndim = max(others.shards.boxes.ndim, *(len(t.shape) for t in tensors))
    first, count = len(others.tensors), len(others.shards)
    boxes = Boxes.of(
        [_block_box(gathered[n].new_shape, lo, hi, ndim) for n, lo, hi in blocks], ndim
    )
    old = others.shards
    shards = Shards(
        np.concatenate([old.tensor, [first + n for n, _, _ in blocks]]).astype(np.int32),
        concatenate([old.boxes, boxes], ndim),
        np.concatenate([old.owner, np.zeros(len(blocks), np.int32)]).astype(np.int32),
    )
    files = [_file_of(catalogue, gathered[n].placement.stored) for n, _, _ in blocks]
    sizes = boxes.volume() * np.array([tensors[n].dtype.itemsize for n, _, _ in blocks], np.int64)
    extents = Extents(
        file=np.concatenate([others.extents.file, files]).astype(np.int32),
        offset=np.concatenate([others.extents.offset, np.zeros(len(blocks), np.int64)]),
        length=np.concatenate([others.extents.length, sizes]),
        contained=True,
    )
    chunks = others.encoded_chunks
    mask = np.zeros(count, bool) if chunks is None else chunks.mask
    reader = _GatherReader(catalogue, gathered)

    def read(row: int) -> NDArray[np.uint8]:
        if row < count and chunks is not None:
            return chunks.read(row)
        number, lo, hi = blocks[row - count]
        return reader.read(number, lo, hi)

    def locate(rows: NDArray[np.int64]) -> ShardOffsets:
        is_old = rows < count
        offset = np.zeros(len(rows), np.int64)
        places = np.flatnonzero(is_old)
        located = others.locate(rows[places])
        offset[places] = located.offset
        return ShardOffsets(
            offset=offset, strides={int(places[k]): v for k, v in located.strides.items()}
        )

    return replace(
        others,
        tensors=[*others.tensors, *tensors],
        shards=shards,
        extents=extents,
        locate_contained=locate,
        encoded_chunks=EncodedChunks(np.concatenate([mask, np.ones(len(blocks), bool)]), read),
        _index={},
    )


class _GatherReader:
    """Reads what stays of tensors; any thread may. Files are open for as long as it is used."""

    def __init__(self, catalogue: Catalogue, gathered: Sequence[GatheredTensor]) -> None:
        self._catalogue, self._gathered = catalogue, gathered
        self._reader = CheckpointReader(catalogue, Files())
        self._lock = threading.Lock()
        weakref.finalize(self, self._reader.close)

    def read(self, number: int, lo: int, hi: int) -> NDArray[np.uint8]:
        """The bytes of rows `lo` to `hi` of what stays of a tensor."""
        tensor = self._gathered[number]
        stored = self._catalogue[tensor.placement.stored]
        placement = replace(tensor.placement, shift=0.0)
        opened, locator = self._reader.open_files, self._reader.locator
        regions = RegionReader(
            locator, self._reader.files, opened, Buffers(), tile_bytes=BLOCK_BYTES
        )
        with self._lock:  # finding a tensor's shards for the first time
            elements = regions.open_stored(placement)
        with elements:
            if not tensor.shape:
                return elements.read(0, 1).copy().view(np.uint8)
            inner = tensor.shape[1:]
            rows = np.arange(lo, hi) if tensor.indices[0] is None else tensor.indices[0][lo:hi]
            out = np.empty((len(rows), *tensor.new_shape[1:]), stored.dtype.view)
            row_size = numel(inner)
            step = max(1, BLOCK_BYTES // max(1, row_size * stored.dtype.itemsize))
            done = 0
            while done < len(rows) and row_size:
                start = int(rows[done])
                stop = min(start + step, int(rows[-1]) + 1)
                end = int(np.searchsorted(rows, stop))
                block = elements.read(start * row_size, stop * row_size)
                block = block.reshape(stop - start, *inner)
                out[done:end] = _take(block, rows[done:end] - start, tensor.indices[1:])
                done = end
        return out.reshape(-1).view(np.uint8)


def _take(
    block: Array, rows: NDArray[np.int64], indices: Sequence[NDArray[np.int64] | None]
) -> Array:
    """Rows of an array, and what stays of its further dimensions."""
    out = block[rows]
    for dim, chosen in enumerate(indices, 1):
        if chosen is not None:
            out = np.take(out, chosen, axis=dim)
    return out


def _row_blocks(tensor: GatheredTensor, itemsize: int) -> list[tuple[int, int]]:
    """The rows of what stays in blocks of about `BLOCK_BYTES`."""
    shape = tensor.new_shape
    if not shape:
        return [(0, 1)]
    step = max(1, BLOCK_BYTES // max(1, numel(shape[1:]) * itemsize))
    return [(lo, min(lo + step, shape[0])) for lo in range(0, shape[0], step)]


def _block_box(shape: Sequence[int], lo: int, hi: int, ndim: int) -> tuple[list[int], list[int]]:
    more = ndim - len(shape)
    first, last = ([lo], [hi]) if shape else ([], [])
    return (
        [*first, *[0] * (len(shape) - len(first)), *[0] * more],
        [*last, *shape[len(last) :], *[1] * more],
    )


def _file_of(catalogue: Catalogue, stored: str) -> int:
    """A file that a stored tensor is in."""
    rows = catalogue.shards.of(catalogue.index[stored])
    return int(catalogue.extents.file[rows.start]) if rows.stop > rows.start else 0


def expand(indices: Sequence[int] | None, block: int) -> NDArray[np.int64] | None:
    """Indices of runs of `block` elements as indices of elements."""
    if indices is None:
        return None
    numbers = np.asarray(indices, np.int64)
    return (numbers[:, None] * block + np.arange(block, dtype=np.int64)).reshape(-1)
