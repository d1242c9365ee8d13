"""Tiles of a weight with a low-rank update added to them."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from megtool.dtypes import DType
from megtool.tensors.box import strides
from megtool.transport.cast import cast
from megtool.transport.quantized_decode import PackedTileReader
from megtool.transport.reduce import sum_dtype
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import Index, TileReader, shaped_buffer, split_box
from megtool.transport.weight_update import UpdateAdder


class MergedTiles:
    """Reads a weight tile by tile, adds its update, and rounds the sum once to `target`.

    The reader converts to `sum_dtype(target)`. Row-major order of the view `shape` is that of the
    weight. `cell_bytes` is the size of the largest element, and dimensions from `depth` on are
    never cut.
    """

    def __init__(
        self,
        reader: TileReader | PackedTileReader,
        adder: UpdateAdder,
        buffers: Buffers,
        *,
        shape: Index,
        target: DType,
        tile_bytes: int,
        cell_bytes: int,
        depth: int,
    ) -> None:
        self._reader, self._adder, self._buffers = reader, adder, buffers
        self._steps, self._target, self._kind = strides(shape), target, sum_dtype(target)
        self._tile_bytes, self._cell, self._depth = tile_bytes, cell_bytes, depth
        self.overflowed = self.rounded = 0

    def tiles(self, lo: Index, hi: Index) -> Generator[tuple[Index, Array], None, None]:
        """Tiles of the row-major-contiguous box `lo:hi`, like `TileReader.tiles`.

        Raises:
            FormatError: a finite weight is NaN or Inf with the update.
        """
        try:
            for a, b in split_box(lo, hi, self._cell, self._tile_bytes, depth=self._depth):
                total = self._sum(a, b)
                if not (finite := np.isfinite(self._values(total))).all():
                    weights = np.isfinite(self._values(self._reader.tile(a, b)))
                    if lost := np.count_nonzero(weights & ~finite):
                        raise self._adder.overflow(int(lost), self._kind)
                    total = self._sum(a, b)
                yield a, self._rounded(total)
        finally:
            self._reader.close()

    def _sum(self, lo: Index, hi: Index) -> Array:
        total = self._reader.tile(lo, hi)
        first = sum(i * s for i, s in zip(lo, self._steps, strict=True))
        with np.errstate(all="ignore"):  # weights may contain Inf and NaN
            self._adder.add(self._values(total), first)
        return total

    def _values(self, total: Array) -> Array:
        return total.reshape(-1).view(self._kind.view)

    def _rounded(self, total: Array) -> Array:
        if self._kind == self._target:
            return total
        out = shaped_buffer(self._buffers, "sum", total.shape, self._target.itemsize)
        self.overflowed += cast(total, self._kind, out, self._target)
        return out
