"""The chunks of zarr arrays as shards: which files hold them, at which bytes, or as which cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Cells, Extents, Located, StoredFile
from megtool.checkpoint.digest import crc32c
from megtool.checkpoint.formats.header_reader import read_exact
from megtool.checkpoint.formats.zarr_metadata import ArrayMetadata
from megtool.errors import FormatError
from megtool.tensors.box import Boxes, Ints, numel, row_major_strides, strides
from megtool.tensors.sharded import Shards

MOST_CHUNKS = 1 << 22
MOST_CELL_BYTES = 4 << 30
"""Chunks that have to be decoded are held in memory whole: larger ones are refused."""

_MISSING = (1 << 64) - 1
_INCOMPLETE = "a chunk file is truncated or of another array: copy the whole folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array of a checkpoint: its name, its folder, and the files in it by chunk key.

    Where it is `in_database`, no file is a chunk: all are cells, the missing ones too.
    """

    name: str
    folder: str
    metadata: ArrayMetadata
    metadata_file: int
    files: Mapping[str, int]
    in_database: bool = False


@dataclass(slots=True)
class _Table:
    """Shards of all arrays, in columns that grow array by array."""

    tensor: list[Ints] = field(default_factory=list)
    lo: list[Ints] = field(default_factory=list)
    hi: list[Ints] = field(default_factory=list)
    file: list[Ints] = field(default_factory=list)
    offset: list[Ints] = field(default_factory=list)
    length: list[Ints] = field(default_factory=list)
    is_cell: list[NDArray[np.bool_]] = field(default_factory=list)
    is_missing: list[NDArray[np.bool_]] = field(default_factory=list)
    num: int = 0


class Chunks:
    """All chunks of all arrays of a checkpoint, each a row of `shards`.

    Chunks of raw elements are extents. A chunk at the edge of its array is stored padded to full
    size, so its rows keep the pitch of a full one (`locate`). All others are cells: encoded chunks,
    read through `decode`, and missing ones, which are full of the fill value.

    Raises:
        FormatError: more chunks than anybody meant, a file that is no chunk of its array, an index
            that contradicts its shard, or a chunk too large to be decoded.
    """

    def __init__(
        self, root: Path, files: Sequence[StoredFile], arrays: Sequence[Array], decode: Any
    ) -> None:
        self._root, self._files, self._arrays, self._decode = root, files, arrays, decode
        ndim = max((len(a.metadata.shape) for a in arrays), default=0)
        table = _Table()
        for number, array in enumerate(arrays):
            self._add(number, array, table, ndim)
        self._pitch = np.zeros((len(arrays), ndim), np.int64)
        for number, array in enumerate(arrays):
            m = array.metadata
            pitch = strides(m.inner[::-1])[::-1] if m.is_column_major else strides(m.inner)
            self._pitch[number, : len(pitch)] = pitch
        one = np.zeros(0, np.int64)
        wide = np.zeros((0, ndim), np.int64)
        tensor = np.concatenate([one, *table.tensor])
        self.shards = Shards(
            tensor.astype(np.int32),
            Boxes(np.concatenate([wide, *table.lo]), np.concatenate([wide, *table.hi])),
            np.zeros(len(tensor), np.int32),
        )
        self.extents = Extents(
            file=np.concatenate([one, *table.file]).astype(np.int32),
            offset=np.concatenate([one, *table.offset]),
            length=np.concatenate([one, *table.length]),
            contained=True,
        )
        none = np.zeros(0, bool)
        self._missing = np.concatenate([none, *table.is_missing])
        held = np.concatenate([none, *table.is_cell])
        self.cells = Cells(held, self._read) if held.any() else None

    def locate(self, rows: NDArray[np.int64]) -> Located:
        """Where raw elements lie: in their file, or from the start of a cell."""
        held = self.cells.held[rows] if self.cells else np.zeros(len(rows), bool)
        raw = ~held
        shape = self.shards.boxes.shape[rows]
        pitch = self._pitch[self.shards.tensor[rows]]
        odd = raw & ((shape > 1) & (pitch != row_major_strides(shape))).any(axis=1)
        return Located(
            offset=np.where(raw, self.extents.offset[rows], 0),
            strides={int(r): tuple(pitch[r].tolist()) for r in np.flatnonzero(odd)},
        )

    def missing_tensors(self) -> list[int]:
        """The tensor of every chunk that is not stored."""
        found: list[int] = self.shards.tensor[self._missing].tolist()
        return found

    def _read(self, row: int) -> NDArray[np.uint8]:
        """The bytes of one cell."""
        number = int(self.shards.tensor[row])
        array = self._arrays[number]
        m = array.metadata
        n = len(m.shape)
        lo, hi = self.shards.boxes.lo[row, :n].tolist(), self.shards.boxes.hi[row, :n].tolist()
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        missing = self._missing[row]
        found = np.full(shape, m.fill[0]) if missing else self._decode(array, lo, hi)
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8)

    def _add(self, number: int, array: Array, table: _Table, ndim: int) -> None:
        m = array.metadata
        n = len(m.shape)
        total = numel(m.grid)
        if table.num + total > MOST_CHUNKS:
            raise FormatError(
                f"chunks of {list(m.inner)} cut the shape {list(m.shape)} into {total:,} parts",
                file=self._root / self._files[array.metadata_file].path,
                tensor=array.name,
                hint=f"at most {MOST_CHUNKS:,} of a whole checkpoint are read",
            )
        at = np.stack(np.unravel_index(np.arange(total), m.grid), axis=1) if n and total else None
        at = np.zeros((total, n), np.int64) if at is None else at.astype(np.int64)
        inner = np.array(m.inner, np.int64)
        lo = at * inner
        hi = np.minimum(lo + inner, np.array(m.shape, np.int64))
        per = np.array(m.chunk, np.int64) // inner
        if array.in_database:
            file = np.full(total, array.metadata_file, np.int64)
            offset = length = np.zeros(total, np.int64)
            is_cell = np.ones(total, bool)
        elif m.is_sharded:
            file, offset, length, is_cell = self._sharded(array, at, per)
        else:
            file, offset, length, is_cell = self._whole(array, at)
        if is_cell.any() and m.inner_bytes > MOST_CELL_BYTES:
            raise FormatError(
                f"a chunk of {m.inner_bytes:,} bytes is too large to be decoded in memory",
                file=self._root / array.folder,
                tensor=array.name,
                hint="write the array with smaller chunks, or without compression",
            )
        table.is_missing.append(file < 0)
        file[file < 0] = array.metadata_file
        table.tensor.append(np.full(total, number, np.int64))
        pad = np.zeros((total, ndim - n), np.int64)
        table.lo.append(np.concatenate([lo, pad], axis=1))
        table.hi.append(np.concatenate([hi, pad + 1], axis=1))
        table.file.append(file)
        table.offset.append(offset)
        table.length.append(length)
        table.is_cell.append(is_cell)
        table.num += total

    def _whole(self, array: Array, at: Ints) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
        """Chunks of which each is a file."""
        m = array.metadata
        file = np.array([array.files.get(m.key(tuple(p)), -1) for p in at.tolist()], np.int64)
        size = np.array([self._files[f].size if f >= 0 else 0 for f in file.tolist()], np.int64)
        if m.is_raw:
            for row in np.flatnonzero((file >= 0) & (size != m.inner_bytes))[:1].tolist():
                self._refuse(array, int(file[row]), f"holds {int(size[row]):,} bytes", m)
        is_cell = (file < 0) | np.full(len(file), not m.is_raw)
        return file, np.zeros(len(file), np.int64), size, is_cell

    def _sharded(
        self, array: Array, at: Ints, per: Ints
    ) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
        """Chunks of which many are in a file, at places that its index tells."""
        m = array.metadata
        n = len(at)
        file, offset, length = (np.full(n, v, np.int64) for v in (-1, 0, 0))
        inside = (at % per * np.array(strides(per.tolist()), np.int64)).sum(axis=1)
        whole = [-(-g // p) for g, p in zip(m.grid, per.tolist(), strict=True)]
        number = (at // per * np.array(strides(whole), np.int64)).sum(axis=1)
        _, first, which = np.unique(number, return_index=True, return_inverse=True)
        shards = (at // per)[first]
        order = np.argsort(which.reshape(-1), kind="stable")
        ends = np.searchsorted(which.reshape(-1)[order], np.arange(len(shards) + 1))
        for k, position in enumerate(shards.tolist()):
            rows = order[ends[k] : ends[k + 1]]
            found = array.files.get(m.key(tuple(position)), -1)
            if found < 0:
                continue
            if m.index is None:
                # Where in the file they are is the library's business; the sum is what is read.
                size = self._files[found].size
                share = np.arange(len(rows) + 1) * size // max(len(rows), 1)
                file[rows], offset[rows], length[rows] = found, share[:-1], np.diff(share)
                continue
            index = self._index(array, found, int(per.prod()))
            here = index[inside[rows]]
            stored = (here != np.uint64(_MISSING)).any(axis=1)
            rows, here = rows[stored], here[stored]
            for start, num in here[here[:, 1] != m.inner_bytes][:1].tolist():
                self._refuse(array, found, f"has a chunk of {num:,} bytes at {start:,}", m)
            start_at, end_at = self._data(array, found, int(per.prod()))
            outside = here[:, 0] < start_at
            outside |= here[:, 0] > max(end_at - m.inner_bytes, 0)
            for start, num in here[outside][:1].tolist():
                self._refuse(array, found, f"has a chunk of {num:,} bytes at {start:,}", m)
            file[rows], offset[rows], length[rows] = found, here[:, 0], here[:, 1]
        return file, offset, length, (file < 0) | np.full(n, m.index is None)

    def _data(self, array: Array, file: int, num: int) -> tuple[int, int]:
        """Where in a shard chunks may lie: not in its index."""
        how, size = array.metadata.index, self._files[file].size
        held = 16 * num + (4 if how and how.checksum else 0)
        return (0, size - held) if how and how.at_end else (held, size)

    def _index(self, array: Array, file: int, num: int) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk of a shard, uint64 `[num, 2]`."""
        how = array.metadata.index
        stored = self._files[file]
        first, end = self._data(array, file, num)
        if end < first:
            self._refuse(array, file, f"of {stored.size:,} bytes lacks an index", array.metadata)
        at, size = (end, stored.size - end) if how and how.at_end else (0, first)
        data = read_exact(self._root / stored.path, at, size)
        if how and how.checksum:
            want = int.from_bytes(data[-4:], "little")
            if crc32c(data[:-4]) != want:
                self._refuse(array, file, "has an index with a wrong checksum", array.metadata)
        return np.frombuffer(data[: 16 * num], "<u8").reshape(num, 2)

    def _refuse(self, array: Array, file: int, what: str, m: ArrayMetadata) -> None:
        raise FormatError(
            f"the chunk file {what}; chunks of {list(m.inner)} {m.dtype} have {m.inner_bytes:,}",
            file=self._root / self._files[file].path,
            tensor=array.name,
            hint=_INCOMPLETE,
        )
