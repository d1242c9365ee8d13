"""Reads canonical or stored tensors of a checkpoint, whole or tile by tile."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import numpy as np

from megtool.dtypes import DType
from megtool.storage.files import Files
from megtool.storage.location.path import choose_by_latency
from megtool.tensors.box import numel, strides
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, pieces
from megtool.transport.encoded_chunks import SourceFiles
from megtool.transport.quantized_decode import open_tile_reader
from megtool.transport.reading.parallel_scan import STORE_TILE_BYTES
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import choose_tile_bytes

MAX_TILE_GROWTH = 16
"""If a tensor is stored in short runs, tiles may grow to this many times `max_bytes`."""


class CheckpointReader:
    """Reads the tensors of a checkpoint; opens its files at first use. Use in `with`.

    With `is_strict`, scales that make weights NaN or infinite are an error (`FormatError`); without
    it, what they make is there to be measured.
    """

    def __init__(self, catalogue: Catalogue, files: Files, *, is_strict: bool = True) -> None:
        self.catalogue = catalogue
        self.files = files
        self.open_files = SourceFiles(files, [catalogue])
        self.locator = ShardLocator(catalogue, is_strict=is_strict)

    def open_stored(self, name: str) -> TensorView:
        """Open a tensor as stored."""
        tensor = self.catalogue[name]
        return TensorView(self, Placement.identity(name, tensor.shape))

    def open_canonical(self, placement: Placement, dtype: DType | None = None) -> TensorView:
        """Open the canonical tensor at `placement` in a stored one, cast to `dtype` if given."""
        return TensorView(self, placement, dtype)

    def close(self) -> None:
        """Close all files."""
        self.open_files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorView:
    """One tensor to read, in row-major order of `shape` (that of its placement).

    Elements are in `dtype.view`: for dtypes that numpy lacks (bfloat16, FP8) unsigned integers with
    their bits. Packed tensors are decoded to their catalogue dtype. Not thread-safe.
    """

    def __init__(
        self, reader: CheckpointReader, placement: Placement, dtype: DType | None = None
    ) -> None:
        self._reader = reader
        self._placement = placement
        self._number = reader.catalogue.index[placement.stored]
        self._buffers = Buffers()
        stored = reader.catalogue.tensors[self._number]
        self.shape = placement.shape
        self.dtype: DType = dtype or stored.dtype

    def tiles(self, max_bytes: int = 1 << 20) -> Generator[tuple[int, Array], None, None]:
        """Yield the flat index of the first element and about `max_bytes` of consecutive elements.

        Arrays are 1-d and reused for the next tile: copy them to keep them.
        """
        if not numel(self.shape):
            return
        catalogue, opened = self._reader.catalogue, self._reader.open_files
        stored = catalogue.tensors[self._number]
        shards = catalogue.shards.of(self._number)
        rows, boxes = pieces(self._placement, catalogue.shards.boxes[shards])
        file_view = self._reader.locator.locate(
            self._placement, self._number, rows.astype(np.int64) + shards.start, boxes
        )
        lo = (0,) * len(self.shape)
        slice_bytes = max_bytes
        max_bytes = max(max_bytes, choose_by_latency(catalogue.root, 0, STORE_TILE_BYTES))
        item = max(self.dtype.itemsize, stored.dtype.itemsize)
        size = choose_tile_bytes(
            [file_view], lo, self.shape, item, max_bytes, MAX_TILE_GROWTH * max_bytes
        )
        reader = open_tile_reader(
            file_view,
            self._reader.files,
            opened,
            self._buffers,
            source=stored,
            target=self.dtype,
            tile_bytes=size,
            shift=-self._placement.shift,
        )
        step = strides(self.shape)
        with closing(reader.tiles(lo, self.shape)) as stream:
            for index, tile in stream:
                flat = sum(i * s for i, s in zip(index, step, strict=True))
                elements = tile.reshape(-1).view(self.dtype.view)
                if max_bytes == slice_bytes:
                    yield flat, elements
                    continue
                count = max(1, slice_bytes // self.dtype.itemsize)
                for first in range(0, len(elements), count):
                    yield flat + first, elements[first : first + count]

    def read(self) -> Array:
        """All elements, in `shape`."""
        out = np.empty(self.shape, self.dtype.view)
        flat = out.reshape(-1)
        for offset, tile in self.tiles():
            flat[offset : offset + tile.size] = tile
        return out
