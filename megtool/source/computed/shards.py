"""A catalogue in which some tensors are computed from others when they are read.

Such a tensor has no place in a file. It is cut into blocks of a few megabytes, and each block is a
shard that `EncodedChunks` reads: it goes through the same plan, digests and proofs as any other,
whatever is written from it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.storage.files import Files
from megtool.tensors.box import Boxes, concatenate
from megtool.tensors.catalogue import Catalogue, EncodedChunks, Extents, ShardOffsets
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards
from megtool.transport.computed_tensors import ElementReader, RegionReader
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.strided import Buffers

BLOCK_BYTES = 4 << 20
"""Blocks have at most about this many bytes."""

Corner = tuple[int, ...]
ReadBlock = Callable[[int, Corner, Corner], NDArray[np.uint8]]
"""Computes the raw row-major bytes of the block `lo:hi` of a computed tensor, by its number; any
thread may call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedTensor:
    """A tensor, the blocks `(lo, hi)` that it is computed in, and a stored tensor `of` whose file
    stands for it."""

    tensor: GlobalTensor
    of: str
    blocks: Sequence[tuple[Corner, Corner]]


class SourceTensors:
    """The tensors that computed ones are computed from; any thread may open them.

    Files are open for as long as it is used.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._reader = CheckpointReader(catalogue, Files())
        self._lock = threading.Lock()
        weakref.finalize(self, self._reader.close)

    def dtype(self, placement: Placement) -> DType:
        """The stored dtype of a tensor."""
        return self._catalogue[placement.stored].dtype

    def open(self, placement: Placement, kind: DType | None = None) -> ElementReader:
        """Open a tensor, decoded and cast to `kind`, by default its stored dtype."""
        reader = self._reader
        regions = RegionReader(
            reader.locator, reader.files, reader.open_files, Buffers(), tile_bytes=BLOCK_BYTES
        )
        with self._lock:  # finding a tensor's shards for the first time
            return regions.open(placement, kind or self.dtype(placement))


def with_computed(
    catalogue: Catalogue,
    removed: frozenset[str],
    computed: Sequence[ComputedTensor],
    read_block: ReadBlock,
    *,
    identity: Callable[[], bytes] | None = None,
) -> Catalogue:
    """The catalogue without the stored tensors in `removed`, and with computed ones instead.

    `identity` is what they depend on besides the files of the checkpoint.
    """
    others = catalogue.select(lambda name: name not in removed)
    blocks = [(number, *block) for number, c in enumerate(computed) for block in c.blocks]
    tensors = [c.tensor for c in computed]
    ndim = max([others.shards.boxes.ndim, *(len(t.shape) for t in tensors)])
    first, count = len(others.tensors), len(others.shards)
    boxes = Boxes.of([_pad(lo, hi, ndim) for _, lo, hi in blocks], ndim)
    old = others.shards
    shards = Shards(
        np.concatenate([old.tensor, [first + n for n, _, _ in blocks]]).astype(np.int32),
        concatenate([old.boxes, boxes], ndim),
        np.concatenate([old.owner, np.zeros(len(blocks), np.int32)]).astype(np.int32),
    )
    files = [_file_of(catalogue, computed[n].of) for n, _, _ in blocks]
    sizes = boxes.volume() * np.array([tensors[n].dtype.itemsize for n, _, _ in blocks], np.int64)
    extents = Extents(
        file=np.concatenate([others.extents.file, files]).astype(np.int32),
        offset=np.concatenate([others.extents.offset, np.zeros(len(blocks), np.int64)]),
        length=np.concatenate([others.extents.length, sizes]),
        contained=True,
    )
    chunks = others.encoded_chunks
    mask = np.zeros(count, bool) if chunks is None else chunks.mask

    def read(row: int) -> NDArray[np.uint8]:
        if row < count and chunks is not None:
            return chunks.read(row)
        return read_block(*blocks[row - count])

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
        computed_identity=identity or others.computed_identity,
        _index={},
    )


def _pad(lo: Corner, hi: Corner, ndim: int) -> tuple[list[int], list[int]]:
    more = ndim - len(lo)
    return [*lo, *[0] * more], [*hi, *[1] * more]


def _file_of(catalogue: Catalogue, stored: str) -> int:
    """A file that a stored tensor is in."""
    rows = catalogue.shards.of(catalogue.index[stored])
    return int(catalogue.extents.file[rows.start]) if rows.stop > rows.start else 0
