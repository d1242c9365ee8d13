"""The weighted sum of several tensors, tile by tile, rounded once at the end."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from megtool.dtypes import DType, dtype
from megtool.transport.cast import cast
from megtool.transport.quantized_decode import PackedTileReader
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import Index, TileReader, shaped_buffer, split_box


def sum_dtype(target: DType) -> DType:
    """The dtype of sums: float32, or float64 if the target is float64."""
    return dtype("float64" if target.name == "float64" else "float32")


class WeightedSum:
    """Reads several tensors tile by tile and returns their sum, each times its share.

    Every reader reads the same view and converts to `sum_dtype(target)`. One tile of one reader and
    the sum are in memory at a time. `cell_bytes` is the size of the largest element read, and
    dimensions from `depth` on are never cut.
    """

    def __init__(
        self,
        terms: Sequence[tuple[float, TileReader | PackedTileReader]],
        buffers: Buffers,
        *,
        target: DType,
        tile_bytes: int,
        cell_bytes: int,
        depth: int,
    ) -> None:
        self._terms, self._buffers, self._target = terms, buffers, target
        self._tile_bytes, self._cell, self._depth = tile_bytes, cell_bytes, depth
        self._kind = sum_dtype(target)
        self._cached_arrays: tuple[Array, Array] | None = None
        self.overflowed = self.rounded = 0

    def tiles(self, lo: Index, hi: Index) -> Generator[tuple[Index, Array], None, None]:
        """Tiles of the row-major-contiguous box `lo:hi`, like `TileReader.tiles`."""
        try:
            for a, b in split_box(lo, hi, self._cell, self._tile_bytes, depth=self._depth):
                total, out = self._arrays(tuple(y - x for x, y in zip(a, b, strict=True)))
                with np.errstate(all="ignore"):  # weights may contain Inf and NaN
                    self._sum(a, b, total)
                if self._kind != self._target:
                    self.overflowed += cast(total, self._kind, out, self._target)
                yield a, out
        finally:
            for _, reader in self._terms:
                reader.close()

    def _sum(self, a: Index, b: Index, total: Array) -> None:
        for number, (share, reader) in enumerate(self._terms):
            factor = total.dtype.type(share)
            term = reader.tile(a, b).view(total.dtype)
            if number == 0:
                np.multiply(term, factor, out=total)
            else:
                np.multiply(term, factor, out=term)
                np.add(total, term, out=total)

    def _arrays(self, shape: Index) -> tuple[Array, Array]:
        """The arrays of the sum and of its rounded result, reused for the same shape."""
        if self._cached_arrays is None or self._cached_arrays[0].shape != shape:
            total = shaped_buffer(self._buffers, "sum", shape, self._kind.itemsize)
            out = total
            if self._kind != self._target:
                out = shaped_buffer(self._buffers, "tile", shape, self._target.itemsize)
            self._cached_arrays = total.view(self._kind.view), out
        return self._cached_arrays
