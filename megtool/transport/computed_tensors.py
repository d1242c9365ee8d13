"""Target tensors that are computed from source tensors instead of copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megtool.dtypes import DType
from megtool.storage.files import Files
from megtool.storage.open_files import OpenFiles
from megtool.tensors.box import numel, strides
from megtool.tensors.placement import Placement, pieces
from megtool.transport.quantized_decode import open_tile_reader
from megtool.transport.shard_locator import FileView, ShardLocator
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import Index, shaped_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRegion:
    """A box of a target tensor."""

    stored: str
    lo: Index
    hi: Index

    @property
    def placement(self) -> Placement:
        """The placement of the box in the stored tensor."""
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
    """A part of a plan that computes the elements it writes. It is one step of a unit of work.

    `reads`, `writes` and `identity` determine its bytes, so an interrupted run is resumed only with
    the same feeds. `num_bytes` are written.
    """

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The canonical tensors of the first source that it reads."""

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The regions it fills, every element once; nothing else writes there."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all regions."""

    @property
    def identity(self) -> bytes:
        """Everything else that determines the bytes written, for the fingerprint."""

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """Yield the number of a region, an index inside it, and the elements to write there.

        Elements are unsigned integers of the dtype's width; the array may be reused for the next.
        """


class RegionReader:
    """Opens the tensors that a feed reads, in one thread, with reused buffers.

    `overflowed` counts, by stored tensor, numbers that a cast made infinite. A feed that casts its
    own values adds the number that `cast` returns.
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
        """Open a canonical tensor, decoded and cast to `dtype`."""
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
        """Open a tensor in its stored dtype: the bits, without interpretation."""
        return self.open(placement, self._locator.catalogue[placement.stored].dtype)


class ElementReader:
    """Reads one tensor in row-major order of its view. Use in `with`."""

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
            shift=-placement.shift,
        )

    def read(self, first: int, end: int) -> Array:
        """The elements `first:end` as `DType.view`, in memory that the next call reuses."""
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
    """Locate all elements of a placement in files."""
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
