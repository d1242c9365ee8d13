"""Side: where a tensor's elements lie in files, as one located lattice per shard piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue
from megtool.errors import FormatError
from megtool.tensors.box import Boxes, Ints, strides
from megtool.tensors.relation import Placement, lattice
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Pieces of one view, in files: row `i` holds the elements `lo[i]:hi[i]`.

    The element at `lo[i] + x` lies at byte `start[i] + sum(x * step[i])` of `paths[i]`. An element
    has `cell_bytes`; where a tensor is packed, an "element" is a packed row and the view is what
    remains of it without the row's own dimension (`lo.shape[1]` dimensions).
    """

    paths: list[Path]
    start: Ints
    step: Ints
    lo: Ints
    hi: Ints
    cell_bytes: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def ndim(self) -> int:
        """Dimensions of the view (of rows, where packed)."""
        return int(self.lo.shape[1])


class Locator:
    """Sides of a catalogue's tensors; shards are located once, in batches, at first use."""

    def __init__(self, catalogue: Catalogue, paths: Sequence[Path] | None = None) -> None:
        self.catalogue = catalogue
        self._paths = paths
        self._offset = np.full(len(catalogue.shards), -1, np.int64)
        self._strides: dict[int, tuple[int, ...]] = {}

    def side(self, placement: Placement, tensor: int, shards: Ints, boxes: Boxes) -> Side:
        """Where the view boxes lie that the given shards of a tensor hold.

        Raises:
            FormatError: a shard cuts through packed rows.
        """
        stored, catalogue = self.catalogue.tensors[tensor], self.catalogue
        n = len(placement.shape)
        lo, hi = boxes.lo[:, :n], boxes.hi[:, :n]
        shard = catalogue.shards.boxes[shards]
        base, stride = lattice(placement, shard.lo, shard.hi, lo)
        offset = self.offsets(shards)
        for row in [r for r, s in enumerate(shards.tolist()) if s in self._strides]:
            actual = self._strides[int(shards[row])]
            base[row], stride[row] = _permuted(placement, actual, shard.lo[row], lo[row])
        cell, depth = stored.dtype.itemsize, n
        if stored.packing is not None:
            columns = stored.shape[-1]
            cell = int(catalogue.extents.length[shards[0]]) // (int(shard.volume()[0]) // columns)
            depth = row_dims(placement, stored)
            if (stride[:, :depth] % columns).any() or (base % columns).any():
                raise FormatError("a piece begins inside a packed row", tensor=stored.name)
            base, stride = base // columns, stride // columns
        files = catalogue.extents.file[shards].tolist()
        paths = {f: self.path(f) for f in set(files)}
        return Side(
            paths=[paths[f] for f in files],
            start=offset + base * cell,
            step=stride[:, :depth] * cell,
            lo=lo[:, :depth],
            hi=hi[:, :depth],
            cell_bytes=cell,
        )

    def path(self, file: int) -> Path:
        """The full path of file number `file`: where it is written, for a target."""
        return self.catalogue.path(file) if self._paths is None else self._paths[file]

    def offsets(self, shards: Ints) -> Ints:
        """Absolute byte offsets of the given shards' data."""
        missing = np.unique(shards[self._offset[shards] < 0])
        if len(missing):
            located = self.catalogue.locate(missing)
            for row, actual in located.strides.items():
                self._strides[int(missing[row])] = actual
            self._offset[missing] = located.offset
        return self._offset[shards]

    def permuted(self, shards: Ints) -> NDArray[np.bool_]:
        """Which of the given (located) shards are not row-major."""
        if not self._strides:
            return np.zeros(len(shards), bool)
        return np.array([s in self._strides for s in shards.tolist()], bool)


def _permuted(
    p: Placement, actual: tuple[int, ...], shard_lo: Ints, view_lo: Ints
) -> tuple[int, list[int]]:
    """Position and strides of a view box in a shard whose elements have strides of their own."""
    base = sum((b - int(shard_lo[d])) * actual[d] for d, b in enumerate(p.base))
    stride = [m * actual[d] for d, m in zip(p.dims, p.mults, strict=True)]
    return base + sum(int(x) * s for x, s in zip(view_lo, stride, strict=True)), stride


def row_dims(placement: Placement, stored: GlobalTensor) -> int:
    """How many leading view dimensions enumerate the rows of a packed tensor.

    Raises:
        FormatError: the rows are not whole in the view.
    """
    columns, last = stored.shape[-1], len(stored.shape) - 1
    for depth in range(len(placement.shape) + 1):
        tail = placement.shape[depth:]
        inner = strides(tail)
        size = tail[0] * inner[0] if tail else 1
        whole = all(
            n == 1 or (d == last and m == s)
            for n, d, m, s in zip(
                tail, placement.dims[depth:], placement.mults[depth:], inner, strict=True
            )
        )
        if size == columns and whole:
            return depth
    raise FormatError(
        f"rows of {columns} packed elements are cut by the view {placement.shape}",
        tensor=stored.name,
    )
