"""Decodes tiles of a quantized tensor from its codes, scales and zero points, in any files."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from megtool.dtypes import DType, dtype
from megtool.errors import FormatError
from megtool.number_formats.decode import decode
from megtool.number_formats.packed_parts import PackedPart, volume
from megtool.storage.files import Files
from megtool.storage.open_files import OpenFiles
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.shard_locator import FileView, PackedFileView
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import (
    COMPUTED_BYTES,
    Index,
    TileIO,
    TileReader,
    shaped_buffer,
    split_box,
)

DECODE_ELEMENTS = COMPUTED_BYTES // 4
"""Elements decoded at once, as float32, if memory allows."""


def open_tile_reader(
    file_view: FileView,
    files: Files,
    open_files: OpenFiles,
    buffers: Buffers,
    *,
    source: GlobalTensor,
    target: DType,
    tile_bytes: int,
    shift: float = 0.0,
) -> TileReader | PackedTileReader:
    """Open a tensor, quantized or not, to read tiles converted to `target`.

    `shift` is added to the elements of one that is not quantized.
    """
    if file_view.packed is None:
        return TileReader(
            file_view,
            files,
            open_files,
            buffers,
            source=source,
            target=target,
            tile_bytes=tile_bytes,
            shift=shift,
        )
    return PackedTileReader(
        file_view,
        file_view.packed,
        files,
        open_files,
        buffers,
        target=target,
        tile_bytes=tile_bytes,
    )


class PackedTileReader:
    """Reads a tensor stored in parts tile by tile, decoded to float32 and cast.

    A tile is filled in boxes of at most `DECODE_ELEMENTS` stored elements, cut so that the codes
    stay contiguous in their file. So memory is bounded even if the view transposes that order.
    """

    def __init__(
        self,
        file_view: FileView,
        packed: PackedFileView,
        files: Files,
        open_files: OpenFiles,
        buffers: Buffers,
        *,
        target: DType,
        tile_bytes: int,
    ) -> None:
        self._packed, self._buffers, self._target = packed, buffers, target
        self._tile_bytes = tile_bytes
        self._cell = max(target.itemsize, 4)
        self._max_elements = min(DECODE_ELEMENTS, max(tile_bytes // 4, 1024))
        self._step: list[int] = file_view.step[0].tolist()
        scratch = buffers.take("scratch", tile_bytes)
        self._io = [
            TileIO(s, files, open_files, scratch, buffers, sieve=True) for s in packed.file_views
        ]
        self._windows: dict[str, Array] = {}
        self.overflowed = self.rounded = 0

    def tiles(self, lo: Index, hi: Index) -> Generator[tuple[Index, Array], None, None]:
        """Tiles of the row-major-contiguous box `lo:hi`, like `TileReader.tiles`."""
        try:
            for a, b in split_box(lo, hi, self._cell, self._tile_bytes):
                yield a, self.tile(a, b)
        finally:
            self.close()

    def tile(self, lo: Index, hi: Index) -> Array:
        """The elements of one box of any size; `close` releases the files."""
        shape = tuple(y - x for x, y in zip(lo, hi, strict=True))
        out = shaped_buffer(self._buffers, "tile", shape, self._target.itemsize)
        self._fill(lo, hi, out)
        return out

    def close(self) -> None:
        """Release the files."""
        for traffic in self._io:
            traffic.close()

    def _fill(self, a: Index, b: Index, out: Array) -> None:
        """Decode the view box `a:b` into `out`, split until it fits the memory limit."""
        lo, hi = self._reach(a, b)
        size = [y - x for x, y in zip(a, b, strict=True)]
        total = volume(lo, hi)
        wide = [d for d in range(len(size)) if size[d] > 1]
        if total <= self._max_elements or not wide:
            self._decode(lo, hi, out)
            return
        d = max(wide, key=lambda d: self._step[d])
        rows = max(1, min(size[d] - 1, self._max_elements * size[d] // total))
        grain = self._packed.grain[self._packed.dims[d]]
        if rows > grain:
            rows -= rows % grain
        for i in range(0, size[d], rows):
            end = min(i + rows, size[d])
            index: tuple[Any, ...] = (*(slice(None) for _ in range(d)), slice(i, end), ...)
            self._fill(
                (*a[:d], a[d] + i, *a[d + 1 :]), (*b[:d], a[d] + end, *b[d + 1 :]), out[index]
            )

    def _reach(self, a: Index, b: Index) -> tuple[Index, Index]:
        """The box of the stored tensor that contains the view box `a:b`."""
        p = self._packed
        lo, hi = list(p.base), [x + 1 for x in p.base]
        for d, m, x, y in zip(p.dims, p.mults, a, b, strict=True):
            lo[d] += x * m
            hi[d] += (y - 1) * m
        return tuple(lo), tuple(hi)

    def _decode(self, lo: Index, hi: Index, out: Array) -> None:
        p = self._packed
        windows = {}
        for part, traffic in zip(p.parts, self._io, strict=True):
            first, end = part.window(lo, hi)
            raw = self._window(part, tuple(y - x for x, y in zip(first, end, strict=True)))
            traffic.read(first, raw)
            windows[part.role] = raw.view(dtype(part.dtype).view)
        try:
            numbers = decode(p.packing, p.parts, windows, lo, hi, is_strict=p.is_strict)
        except FormatError as e:
            e.file, e.tensor = str(p.file_views[0].paths[0]), p.name
            raise
        order = p.parts[0].order
        solid = np.ascontiguousarray(numbers.transpose(order))
        done = np.empty(solid.shape, f"<u{self._target.itemsize}")
        self.overflowed += cast(solid, dtype("float32"), done, self._target)
        cast_back = done.transpose(np.argsort(order))
        steps = [m * cast_back.strides[d] for d, m in zip(p.dims, p.mults, strict=True)]
        np.copyto(out, as_strided(cast_back, out.shape, steps))

    def _window(self, part: PackedPart, shape: Index) -> Array:
        """Memory for a window; the same array for the same shape, so `TileIO` reuses its plan."""
        window = self._windows.get(part.role)
        if window is None or window.shape != shape:
            item = dtype(part.dtype).itemsize
            window = self._windows[part.role] = shaped_buffer(self._buffers, part.role, shape, item)
        return window
