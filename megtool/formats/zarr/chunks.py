"""The chunks of zarr arrays as shards: byte ranges of files, or encoded chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.formats.header_reader import read_exact
from megtool.formats.zarr.codecs import DecodeError
from megtool.formats.zarr.decoding import (
    MISSING,
    check_index,
    decode_chunk,
    index_bytes,
    max_stored_bytes,
)
from megtool.formats.zarr.metadata import ArrayMetadata
from megtool.tensors.box import Boxes, Ints, numel, row_major_strides, strides
from megtool.tensors.catalogue import EncodedChunks, Extents, ShardOffsets, StoredFile
from megtool.tensors.grouping import grouped
from megtool.tensors.sharded import Shards

MAX_CHUNKS = 1 << 22
MAX_DECODED_BYTES = 4 << 30
"""Encoded chunks are decoded whole in memory; larger ones are refused."""

_PADDED_BYTES = 256 << 20
_PADDED_RATIO = 8
_INCOMPLETE = "a chunk file is truncated or belongs to another array: copy the whole folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """One array of a checkpoint: its name, its folder, and the files in it by chunk key.

    If `in_database`, no file is a chunk: all chunks are encoded, missing ones included.
    """

    name: str
    folder: str
    metadata: ArrayMetadata
    metadata_file: int
    files: Mapping[str, int]
    in_database: bool = False


class ReadChunk(Protocol):
    """Reads the stored bytes of a chunk."""

    def __call__(
        self, array: ZarrArray, position: Sequence[int], extent: tuple[Path, int, int]
    ) -> bytes | None:
        """The bytes of the chunk at `position` in the grid, None if it is missing.

        `extent` is its file, offset and length, of no meaning for an array in a database.
        """


def read_from_file(
    array: ZarrArray, position: Sequence[int], extent: tuple[Path, int, int]
) -> bytes:
    """The bytes of a chunk in a file of its own, or in a shard; at most as many as it may have.

    Raises:
        DecodeError: there are more.
    """
    path, offset, length = extent
    if length > (most := max_stored_bytes(array.metadata)):
        raise DecodeError(f"{length:,} bytes are stored where at most {most:,} are expected")
    return read_exact(path, offset, length)


@dataclass(slots=True)
class _Table:
    """Shards of all arrays, in columns that grow array by array."""

    tensor: list[Ints] = field(default_factory=list)
    lo: list[Ints] = field(default_factory=list)
    hi: list[Ints] = field(default_factory=list)
    file: list[Ints] = field(default_factory=list)
    offset: list[Ints] = field(default_factory=list)
    length: list[Ints] = field(default_factory=list)
    is_encoded: list[NDArray[np.bool_]] = field(default_factory=list)
    is_missing: list[NDArray[np.bool_]] = field(default_factory=list)
    num_chunks: int = 0


class ZarrChunks:
    """All chunks of all arrays of a checkpoint, each a row of `shards`.

    Chunks of raw elements are extents. A chunk at the edge of its array is padded to full size, so
    its rows have the pitch of a full chunk (`locate`). All others are encoded chunks, read through
    `read`, or missing ones, which consist of the fill value.

    Raises:
        FormatError: too many chunks, a file that is not a chunk of its array, an index that
            contradicts its shard, or a chunk too large to decode.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[StoredFile],
        arrays: Sequence[ZarrArray],
        read: ReadChunk = read_from_file,
    ) -> None:
        self._root, self._files, self._arrays, self._read = root, files, arrays, read
        ndim = max((len(a.metadata.shape) for a in arrays), default=0)
        table = _Table()
        for number, array in enumerate(arrays):
            self._add(number, array, table, ndim)
        self._pitch = np.zeros((len(arrays), ndim), np.int64)
        for number, array in enumerate(arrays):
            m = array.metadata
            pitch = strides(m.inner[::-1])[::-1] if m.is_column_major else strides(m.inner)
            self._pitch[number, : len(pitch)] = pitch
        empty = np.zeros(0, np.int64)
        no_boxes = np.zeros((0, ndim), np.int64)
        tensor = np.concatenate([empty, *table.tensor])
        self.shards = Shards(
            tensor.astype(np.int32),
            Boxes(np.concatenate([no_boxes, *table.lo]), np.concatenate([no_boxes, *table.hi])),
            np.zeros(len(tensor), np.int32),
        )
        self.extents = Extents(
            file=np.concatenate([empty, *table.file]).astype(np.int32),
            offset=np.concatenate([empty, *table.offset]),
            length=np.concatenate([empty, *table.length]),
            contained=True,
        )
        no_rows = np.zeros(0, bool)
        self._missing = np.concatenate([no_rows, *table.is_missing])
        is_encoded = np.concatenate([no_rows, *table.is_encoded])
        self.encoded_chunks = (
            EncodedChunks(is_encoded, self._decode_chunk) if is_encoded.any() else None
        )

    def locate(self, rows: NDArray[np.int64]) -> ShardOffsets:
        """The position of raw elements: in their file, or from the start of a decoded chunk."""
        is_encoded = (
            self.encoded_chunks.mask[rows] if self.encoded_chunks else np.zeros(len(rows), bool)
        )
        is_raw = ~is_encoded
        shape = self.shards.boxes.shape[rows]
        pitch = self._pitch[self.shards.tensor[rows]]
        is_strided = is_raw & ((shape > 1) & (pitch != row_major_strides(shape))).any(axis=1)
        return ShardOffsets(
            offset=np.where(is_raw, self.extents.offset[rows], 0),
            strides={int(r): tuple(pitch[r].tolist()) for r in np.flatnonzero(is_strided)},
        )

    def missing_tensors(self) -> list[int]:
        """The tensor of every chunk that is not stored."""
        numbers: list[int] = self.shards.tensor[self._missing].tolist()
        return numbers

    def _decode_chunk(self, row: int) -> NDArray[np.uint8]:
        number = int(self.shards.tensor[row])
        array = self._arrays[number]
        m = array.metadata
        n = len(m.shape)
        lo, hi = self.shards.boxes.lo[row, :n].tolist(), self.shards.boxes.hi[row, :n].tolist()
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        path = self._root / self._files[int(self.extents.file[row])].path
        extent = path, int(self.extents.offset[row]), int(self.extents.length[row])
        position = [a // i for a, i in zip(lo, m.inner, strict=True)]
        try:
            data = None if self._missing[row] else self._read(array, position, extent)
            elements = np.full(shape, m.fill[0]) if data is None else decode_chunk(m, data)
        except DecodeError as e:
            raise FormatError(
                f"elements {lo} to {hi} cannot be decoded: {e}",
                file=path,
                tensor=array.name,
                hint="the chunk is damaged, or not one of this array: fetch or write it again",
            ) from e
        elements = elements[tuple(slice(0, n) for n in shape)]
        return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)

    def _add(self, number: int, array: ZarrArray, table: _Table, ndim: int) -> None:
        m = array.metadata
        n = len(m.shape)
        total = numel(m.grid)
        if table.num_chunks + total > MAX_CHUNKS:
            raise FormatError(
                f"chunks of {list(m.inner)} cut the shape {list(m.shape)} into {total:,} parts",
                file=self._root / self._files[array.metadata_file].path,
                tensor=array.name,
                hint=f"at most {MAX_CHUNKS:,} of a whole checkpoint are read",
            )
        position = (
            np.stack(np.unravel_index(np.arange(total), m.grid), axis=1) if n and total else None
        )
        position = np.zeros((total, n), np.int64) if position is None else position.astype(np.int64)
        inner = np.array(m.inner, np.int64)
        lo = position * inner
        hi = np.minimum(lo + inner, np.array(m.shape, np.int64))
        per = np.array(m.chunk, np.int64) // inner
        if array.in_database:
            file = np.full(total, array.metadata_file, np.int64)
            offset = length = np.zeros(total, np.int64)
            is_encoded = np.ones(total, bool)
        elif m.is_sharded:
            file, offset, length, is_encoded = self._locate_in_shards(array, position, per)
        else:
            file, offset, length, is_encoded = self._locate_files(array, position)
        if is_encoded.any() and m.inner_bytes > MAX_DECODED_BYTES:
            raise FormatError(
                f"a chunk of {m.inner_bytes:,} bytes is too large to decode in memory",
                file=self._root / array.folder,
                tensor=array.name,
                hint="write the array with smaller chunks, or without compression",
            )
        used = numel([min(c, s) for c, s in zip(m.inner, m.shape, strict=True)]) * m.dtype.itemsize
        if is_encoded.any() and m.inner_bytes > max(_PADDED_BYTES, _PADDED_RATIO * used):
            raise FormatError(
                f"a chunk of {m.inner_bytes:,} bytes has only {used:,} of its array",
                file=self._root / array.folder,
                tensor=array.name,
                hint="write the array with chunks of about its own size",
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
        table.is_encoded.append(is_encoded)
        table.num_chunks += total

    def _locate_files(
        self, array: ZarrArray, position: Ints
    ) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
        """Locate chunks that are one file each."""
        m = array.metadata
        file = np.array([array.files.get(m.key(tuple(p)), -1) for p in position.tolist()], np.int64)
        size = np.array([self._files[f].size if f >= 0 else 0 for f in file.tolist()], np.int64)
        if m.is_raw:
            for row in np.flatnonzero((file >= 0) & (size != m.inner_bytes))[:1].tolist():
                self._refuse(array, int(file[row]), f"holds {int(size[row]):,} bytes", m)
        is_encoded = (file < 0) | np.full(len(file), not m.is_raw)
        return file, np.zeros(len(file), np.int64), size, is_encoded

    def _locate_in_shards(
        self, array: ZarrArray, positions: Ints, per: Ints
    ) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
        """Locate chunks in shard files, at the positions in the shard's index."""
        m = array.metadata
        n = len(positions)
        file, offset, length = (np.full(n, v, np.int64) for v in (-1, 0, 0))
        index_in_shard = (positions % per * np.array(strides(per.tolist()), np.int64)).sum(axis=1)
        shard_grid = [-(-g // p) for g, p in zip(m.grid, per.tolist(), strict=True)]
        number = (positions // per * np.array(strides(shard_grid), np.int64)).sum(axis=1)
        first, shard_index = grouped(number)
        shards = (positions // per)[first]
        order = np.argsort(shard_index, kind="stable")
        ends = np.searchsorted(shard_index[order], np.arange(len(shards) + 1))
        for k, position in enumerate(shards.tolist()):
            rows = order[ends[k] : ends[k + 1]]
            shard_file = array.files.get(m.key(tuple(position)), -1)
            if shard_file < 0:
                continue
            index = self._read_index(array, shard_file, int(per.prod()))
            entries = index[index_in_shard[rows]]
            stored = (entries != np.uint64(MISSING)).any(axis=1)
            rows, entries = rows[stored], entries[stored]
            start_at, end_at = self._data_range(array, shard_file, int(per.prod()))
            outside = (entries[:, 0] < start_at) | (entries[:, 1] > end_at)
            outside |= entries[:, 0] > np.maximum(end_at, entries[:, 1]) - entries[:, 1]
            if m.is_raw:
                outside |= entries[:, 1] != m.inner_bytes
            for start, num in entries[outside][:1].tolist():
                self._refuse(array, shard_file, f"has a chunk of {num:,} bytes at {start:,}", m)
            file[rows], offset[rows], length[rows] = shard_file, entries[:, 0], entries[:, 1]
        return file, offset, length, (file < 0) | np.full(n, not m.is_raw)

    def _data_range(self, array: ZarrArray, file: int, num_chunks: int) -> tuple[int, int]:
        """The byte range of a shard that may hold chunks: all but its index."""
        index, size = array.metadata.index, self._files[file].size
        num_bytes = index_bytes((num_chunks,), index) if index else 0
        return (0, size - num_bytes) if index and index.at_end else (num_bytes, size)

    def _read_index(self, array: ZarrArray, file: int, num_chunks: int) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk of a shard, uint64 `[num, 2]`."""
        index = array.metadata.index
        if index is None:
            raise ValueError("only a shard has an index")
        stored = self._files[file]
        first, end = self._data_range(array, file, num_chunks)
        if end < first:
            self._refuse(array, file, f"of {stored.size:,} bytes lacks an index", array.metadata)
        offset, size = (end, stored.size - end) if index.at_end else (0, first)
        data = read_exact(self._root / stored.path, offset, size)
        try:
            return check_index(data, (num_chunks,), index)
        except DecodeError as e:
            self._refuse(array, file, f"has {e}", array.metadata)

    def _refuse(self, array: ZarrArray, file: int, problem: str, m: ArrayMetadata) -> NoReturn:
        raise FormatError(
            f"the chunk file {problem}; chunks of {list(m.inner)} {m.dtype} have {m.inner_bytes:,}",
            file=self._root / self._files[file].path,
            tensor=array.name,
            hint=_INCOMPLETE,
        )
