"""Feed: bytes of target tensors that are made of source tensors, not copied from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.open_files import OpenFiles
from megtool.checkpoint.transport.quantized_decode import open_tile_reader
from megtool.checkpoint.transport.shard_locator import FileView, ShardLocator
from megtool.checkpoint.transport.strided import Array, Buffers
from megtool.checkpoint.transport.tile import Index, shaped_buffer
from megtool.dtypes import DType
from megtool.tensors.box import numel, strides
from megtool.tensors.placement import Placement, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRegion:
    """A box of a target tensor."""

    stored: str
    lo: Index
    hi: Index

    @property
    def placement(self) -> Placement:
        """The box as a tensor of its own that lies in the stored one."""
        shape = tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))
        return Placement(
            canonical="",
            stored=self.stored,
            shape=shape,
            dims=tuple(range(len(shape))),
            mults=(1,) * len(shape),
            base=self.lo,
        )


class TensorFeed(Protocol):
    """A part of a plan that computes what it writes; done, journaled and verified whole.

    All that decides its bytes is in `reads`, `writes` and `facts`, so that a run that was killed
    is resumed by the same feeds alone. `num_bytes` are written.
    """

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The canonical tensors of the first source that it is made of."""

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """What it fills, every element once; nothing else may write there."""

    @property
    def num_bytes(self) -> int:
        """Bytes of what it fills."""

    @property
    def identity(self) -> bytes:
        """What else decides what is written."""

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """The number of a region, an index from its beginning, and elements to be put there.

        Elements are unsigned integers as wide as the tensor's, and are done with at the next step.
        """


class RegionReader:
    """Gives a feed the tensors it reads, in one thread, by buffers that are used again.

    `overflowed` counts, by stored tensor, numbers that a cast on the way made infinite; a feed that
    casts itself adds its own (`cast` says how many).
    """

    def __init__(
        self,
        locator: ShardLocator,
        files: Files,
        open_files: OpenFiles,
        buffers: Buffers,
        *,
        tile_bytes: int,
    ) -> None:
        self._locator, self._files, self._opened = locator, files, open_files
        self._buffers = buffers
        self.tile_bytes = tile_bytes
        self.overflowed: Counter[str] = Counter()

    def open(self, placement: Placement, dtype: DType) -> ElementReader:
        """A canonical tensor, decoded and cast to `dtype`."""
        return ElementReader(
            self._locator,
            self._files,
            self._opened,
            self._buffers,
            placement,
            dtype,
            self.overflowed,
            self.tile_bytes,
        )

    def open_stored(self, placement: Placement) -> ElementReader:
        """A tensor in the type it is stored in: its bits, whatever they mean."""
        return self.open(placement, self._locator.catalogue[placement.stored].dtype)


class ElementReader:
    """One tensor in the row-major order of its elements, whatever its view. Use in `with`."""

    def __init__(
        self,
        locator: ShardLocator,
        files: Files,
        open_files: OpenFiles,
        buffers: Buffers,
        placement: Placement,
        dtype: DType,
        overflowed: Counter[str],
        tile_bytes: int,
    ) -> None:
        catalogue = locator.catalogue
        self._shape, self._dtype, self._buffers = placement.shape, dtype, buffers
        self._stored, self._overflowed = placement.stored, overflowed
        self._tiles = open_tile_reader(
            locate_whole(locator, placement),
            files,
            open_files,
            buffers,
            source=catalogue[placement.stored],
            target=dtype,
            tile_bytes=tile_bytes,
        )

    def read(self, first: int, end: int) -> Array:
        """The elements `first:end` as `DType.view` holds them, in memory the next call reuses."""
        boxes = list(iter_boxes(self._shape, first, end))
        if len(boxes) == 1:
            return self._tiles.tile(*boxes[0]).reshape(-1).view(self._dtype.view)
        out = shaped_buffer(self._buffers, "run", (end - first,), self._dtype.itemsize)
        offset = 0
        for lo, hi in boxes:
            tile = self._tiles.tile(lo, hi).reshape(-1)
            out[offset : offset + tile.size] = tile
            offset += tile.size
        return out.view(self._dtype.view)

    def __enter__(self) -> ElementReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._tiles.close()
        if self._tiles.overflowed:
            self._overflowed[self._stored] += self._tiles.overflowed


def locate_whole(locator: ShardLocator, placement: Placement) -> FileView:
    """Where all of a tensor lies that is placed in a stored one."""
    catalogue = locator.catalogue
    number = catalogue.index[placement.stored]
    shards = catalogue.shards.of(number)
    rows, boxes = pieces(placement, catalogue.shards.boxes[shards])
    return locator.locate(placement, number, rows.astype(np.int64) + shards.start, boxes)


def iter_boxes(shape: Index, first: int, end: int) -> Iterator[tuple[Index, Index]]:
    """A range of the row-major order of `shape` as boxes, in order."""
    step = strides(shape)
    if not shape and first < end:
        yield (), ()
        return
    while first < end:
        lo = tuple(first // s % n for s, n in zip(step, shape, strict=True))
        d = next(d for d, s in enumerate(step) if first % s == 0 and s <= end - first)
        count = min((end - first) // step[d], shape[d] - lo[d])
        hi = (*(x + 1 for x in lo[:d]), lo[d] + count, *shape[d + 1 :])
        yield lo, hi
        first += count * step[d]


def count_region_bytes(region: TargetRegion, itemsize: int) -> int:
    """Bytes of a box."""
    return itemsize * numel(region.placement.shape)
