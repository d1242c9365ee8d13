"""Positions of a tensor's elements in files, as one lattice per shard piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.number_formats.gguf import block, holds_rows
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.tensors.box import Boxes, Ints, strides
from megtool.tensors.catalogue import Catalogue, StoredPart
from megtool.tensors.grouping import distinct
from megtool.tensors.placement import Placement, lattice
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFileView:
    """A view of a tensor stored in parts: its relation to the tensor, and the parts' positions.

    The element at view index `x` is stored element `base[d] + sum(x * mults)` in every dimension
    `d` of the tensor that `dims` name. `file_views[i]` covers the whole array `parts[i]`; codes
    come first. `grain` is the number of elements per dimension that cannot be read separately.
    `name` is the tensor's; with `is_strict`, scales that make its elements NaN or infinite are an
    error when it is decoded.
    """

    name: str
    is_strict: bool
    packing: str
    dims: tuple[int, ...]
    mults: tuple[int, ...]
    base: tuple[int, ...]
    parts: tuple[PackedPart, ...]
    file_views: tuple[FileView, ...]
    grain: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView:
    """Pieces of one view in files: row `i` holds the elements `lo[i]:hi[i]`.

    The element at `lo[i] + x` lies at byte `start[i] + sum(x * step[i])` of `paths[i]`. An element
    has `cell_bytes`. For a packed tensor an "element" is a packed row, and the view lacks the
    dimension of the row (`lo.shape[1]` dimensions). If the view takes a window of every row, the
    "element" is the blocks under it, and `window` is the number of decoded elements, the first and
    the end. For a tensor in several parts (`packed`), positions only give distances of elements.
    `spans` are the first byte and the end of the whole shard of each row (int64 `[n, 2]`), if it is
    known: other views of it read the same bytes.
    """

    paths: list[Path]
    start: Ints
    step: Ints
    lo: Ints
    hi: Ints
    cell_bytes: int
    packed: PackedFileView | None = None
    window: tuple[int, int, int] | None = None
    spans: Ints | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def ndim(self) -> int:
        """Dimensions of the view (of rows, where packed)."""
        return int(self.lo.shape[1])


class ShardLocator:
    """Locates a catalogue's tensors in files; each shard once, in batches, at first use.

    `is_strict`: see `PackedFileView`.
    """

    def __init__(
        self, catalogue: Catalogue, paths: Sequence[Path] | None = None, *, is_strict: bool = True
    ) -> None:
        self.catalogue = catalogue
        self._is_strict = is_strict
        self._paths = paths
        self._offset = np.full(len(catalogue.shards), -1, np.int64)
        self._strides: dict[int, tuple[int, ...]] = {}

    def locate(self, placement: Placement, tensor: int, shards: Ints, boxes: Boxes) -> FileView:
        """Locate the view boxes that the given shards of a tensor hold.

        Raises:
            FormatError: a shard cuts through packed rows.
        """
        stored, catalogue = self.catalogue.tensors[tensor], self.catalogue
        if stored.name in catalogue.packed:
            return self._locate_packed(placement, stored)
        n = len(placement.shape)
        lo, hi = boxes.lo[:, :n], boxes.hi[:, :n]
        shard = catalogue.shards.boxes[shards]
        base, stride = lattice(placement, shard.lo, shard.hi, lo)
        offset = self.offsets(shards)
        for row in [r for r, s in enumerate(shards.tolist()) if s in self._strides]:
            actual = self._strides[int(shards[row])]
            base[row], stride[row] = _strided_lattice(placement, actual, shard.lo[row], lo[row])
        cell, depth, window = stored.dtype.itemsize, n, None
        spans = None
        if stored.packing is None and not self._strides:
            spans = np.stack([offset, offset + shard.volume() * cell], axis=1)
        if stored.packing is not None:
            columns = stored.shape[-1]
            cell = int(catalogue.extents.length[shards[0]]) // (int(shard.volume()[0]) // columns)
            depth = count_row_dims(placement, stored)
            if (stride[:, :depth] % columns).any():
                raise FormatError("a piece begins inside a packed row", tensor=stored.name)
            start, first = offset + base // columns * cell, placement.base[-1]
            step = stride[:, :depth] // columns * cell
            if (size := math.prod(placement.shape[depth:])) < columns:
                each, each_bytes = block(stored.packing.partition(":")[2])
                skip, end = first // each, -(-(first + size) // each)
                start, cell = start + skip * each_bytes, (end - skip) * each_bytes
                window = (end - skip) * each, first - skip * each, first - skip * each + size
        else:
            start, step = offset + base * cell, stride[:, :depth] * cell
        files = self.files(shards).tolist()
        paths = {f: self.path(f) for f in set(files)}
        return FileView(
            paths=[paths[f] for f in files],
            start=start,
            step=step,
            lo=lo[:, :depth],
            hi=hi[:, :depth],
            cell_bytes=cell,
            window=window,
            spans=spans,
        )

    def files(self, shards: Ints) -> Ints:
        """The file numbers of the given shards; an encoded chunk counts as its own file."""
        numbers = self.catalogue.extents.file[shards].astype(np.int64)
        if (cells := self.catalogue.encoded_chunks) is not None:
            numbers = np.where(cells.mask[shards], shards + len(self.catalogue.files), numbers)
        return numbers

    def _locate_packed(self, placement: Placement, stored: GlobalTensor) -> FileView:
        """The whole view: a tensor in parts is one shard. An element counts as one byte."""
        parts = self.catalogue.packed[stored.name]
        codes = parts[0].part
        step = [0] * len(stored.shape)
        grain = [1] * len(stored.shape)
        distance = 1
        for span in reversed(codes.spans):
            if span.dim != WHOLE:
                step[span.dim], distance = distance, distance * stored.shape[span.dim]
                grain[span.dim] = span.per
        shape = np.array([placement.shape], np.int64)
        return FileView(
            paths=[self.path(parts[0].file)],
            start=np.zeros(1, np.int64),
            step=np.array(
                [[m * step[d] for d, m in zip(placement.dims, placement.mults, strict=True)]],
                np.int64,
            ).reshape(shape.shape),
            lo=np.zeros_like(shape),
            hi=shape,
            cell_bytes=1,
            packed=PackedFileView(
                name=stored.name,
                is_strict=self._is_strict,
                packing=stored.packing or "",
                dims=placement.dims,
                mults=placement.mults,
                base=placement.base,
                parts=tuple(p.part for p in parts),
                file_views=tuple(self._locate_part(p) for p in parts),
                grain=tuple(grain),
            ),
        )

    def _locate_part(self, stored: StoredPart) -> FileView:
        item = dtype(stored.part.dtype).itemsize
        shape = np.array([stored.part.shape], np.int64).reshape(1, -1)
        return FileView(
            paths=[self.path(stored.file)],
            start=np.array([stored.offset], np.int64),
            step=np.array([strides(stored.part.shape)], np.int64).reshape(shape.shape) * item,
            lo=np.zeros_like(shape),
            hi=shape,
            cell_bytes=item,
        )

    def path(self, file: int) -> Path:
        """The full path of file number `file`; for a target, the path it is written to."""
        if file >= len(self.catalogue.files):
            return self.catalogue.encoded_chunk_path(file - len(self.catalogue.files))
        return self.catalogue.path(file) if self._paths is None else self._paths[file]

    def offsets(self, shards: Ints) -> Ints:
        """Absolute byte offsets of the given shards' data."""
        missing = distinct(shards[self._offset[shards] < 0])
        if len(missing):
            located = self.catalogue.locate(missing)
            for row, actual in located.strides.items():
                self._strides[int(missing[row])] = actual
            self._offset[missing] = located.offset
        return self._offset[shards]

    def is_permuted(self, shards: Ints) -> NDArray[np.bool_]:
        """Mask of the given (located) shards that are not row-major."""
        if not self._strides:
            return np.zeros(len(shards), bool)
        return np.array([s in self._strides for s in shards.tolist()], bool)


def _strided_lattice(
    p: Placement, actual: tuple[int, ...], shard_lo: Ints, view_lo: Ints
) -> tuple[int, list[int]]:
    """Position and strides of a view box in a shard that is not row-major."""
    base = sum((b - int(shard_lo[d])) * actual[d] for d, b in enumerate(p.base))
    stride = [m * actual[d] for d, m in zip(p.dims, p.mults, strict=True)]
    return base + sum(int(x) * s for x, s in zip(view_lo, stride, strict=True)), stride


def count_cuttable_dims(placement: Placement, stored: GlobalTensor) -> int:
    """The number of leading view dimensions that may be cut: all but those inside packed rows.

    Raises:
        FormatError: the view cuts through packed rows.
    """
    if stored.packing is None or not holds_rows(stored.packing):
        return len(placement.shape)
    return count_row_dims(placement, stored)


def count_row_dims(placement: Placement, stored: GlobalTensor) -> int:
    """The number of leading view dimensions that enumerate the rows of a packed tensor.

    Raises:
        FormatError: the view has neither rows nor one window of each.
    """
    columns, last = stored.shape[-1], len(stored.shape) - 1
    for depth in range(len(placement.shape) + 1):
        tail = placement.shape[depth:]
        is_rows = all(
            n == 1 or (d == last and m == s)
            for n, d, m, s in zip(
                tail, placement.dims[depth:], placement.mults[depth:], strides(tail), strict=True
            )
        )
        head = zip(placement.shape[:depth], placement.dims[:depth], strict=True)
        if is_rows and not any(n > 1 and d == last for n, d in head):
            return depth
    raise FormatError(
        f"rows of {columns} packed elements are cut by the view {placement.shape}",
        tensor=stored.name,
    )
