"""The chunks of zarr arrays as shards: byte ranges of files, or encoded chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import EncodedChunks, Extents, ShardOffsets, StoredFile
from megtool.checkpoint.digest import crc32c
from megtool.checkpoint.formats.header_reader import read_exact
from megtool.checkpoint.formats.zarr_metadata import ArrayMetadata
from megtool.errors import FormatError
from megtool.tensors.box import Boxes, Ints, numel, row_major_strides, strides
from megtool.tensors.sharded import Shards

MAX_CHUNKS = 1 << 22
MAX_DECODED_BYTES = 4 << 30
"""Encoded chunks are decoded whole in memory; larger ones are refused."""

_MISSING = (1 << 64) - 1
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
    `decode`, or missing ones, which consist of the fill value.

    Raises:
        FormatError: too many chunks, a file that is not a chunk of its array, an index that
            contradicts its shard, or a chunk too large to decode.
    """

    def __init__(
        self, root: Path, files: Sequence[StoredFile], arrays: Sequence[ZarrArray], decode: Any
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
        """The decoded bytes of one chunk."""
        number = int(self.shards.tensor[row])
        array = self._arrays[number]
        m = array.metadata
        n = len(m.shape)
        lo, hi = self.shards.boxes.lo[row, :n].tolist(), self.shards.boxes.hi[row, :n].tolist()
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        missing = self._missing[row]
        elements = np.full(shape, m.fill[0]) if missing else self._decode(array, lo, hi)
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
        _, first, shard_index = np.unique(number, return_index=True, return_inverse=True)
        shards = (positions // per)[first]
        order = np.argsort(shard_index.reshape(-1), kind="stable")
        ends = np.searchsorted(shard_index.reshape(-1)[order], np.arange(len(shards) + 1))
        for k, position in enumerate(shards.tolist()):
            rows = order[ends[k] : ends[k + 1]]
            shard_file = array.files.get(m.key(tuple(position)), -1)
            if shard_file < 0:
                continue
            if m.index is None:
                # The library locates them; the lengths only add up to the bytes read.
                size = self._files[shard_file].size
                share = np.arange(len(rows) + 1) * size // max(len(rows), 1)
                file[rows], offset[rows], length[rows] = shard_file, share[:-1], np.diff(share)
                continue
            index = self._read_index(array, shard_file, int(per.prod()))
            entries = index[index_in_shard[rows]]
            stored = (entries != np.uint64(_MISSING)).any(axis=1)
            rows, entries = rows[stored], entries[stored]
            for start, num in entries[entries[:, 1] != m.inner_bytes][:1].tolist():
                self._refuse(array, shard_file, f"has a chunk of {num:,} bytes at {start:,}", m)
            start_at, end_at = self._data_range(array, shard_file, int(per.prod()))
            outside = entries[:, 0] < start_at
            outside |= entries[:, 0] > max(end_at - m.inner_bytes, 0)
            for start, num in entries[outside][:1].tolist():
                self._refuse(array, shard_file, f"has a chunk of {num:,} bytes at {start:,}", m)
            file[rows], offset[rows], length[rows] = shard_file, entries[:, 0], entries[:, 1]
        return file, offset, length, (file < 0) | np.full(n, m.index is None)

    def _data_range(self, array: ZarrArray, file: int, num_chunks: int) -> tuple[int, int]:
        """The byte range of a shard that may hold chunks: all but its index."""
        index, size = array.metadata.index, self._files[file].size
        index_bytes = 16 * num_chunks + (4 if index and index.checksum else 0)
        return (0, size - index_bytes) if index and index.at_end else (index_bytes, size)

    def _read_index(self, array: ZarrArray, file: int, num_chunks: int) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk of a shard, uint64 `[num, 2]`."""
        index = array.metadata.index
        stored = self._files[file]
        first, end = self._data_range(array, file, num_chunks)
        if end < first:
            self._refuse(array, file, f"of {stored.size:,} bytes lacks an index", array.metadata)
        offset, size = (end, stored.size - end) if index and index.at_end else (0, first)
        data = read_exact(self._root / stored.path, offset, size)
        if index and index.checksum:
            expected = int.from_bytes(data[-4:], "little")
            if crc32c(data[:-4]) != expected:
                self._refuse(array, file, "has an index with a wrong checksum", array.metadata)
        return np.frombuffer(data[: 16 * num_chunks], "<u8").reshape(num_chunks, 2)

    def _refuse(self, array: ZarrArray, file: int, problem: str, m: ArrayMetadata) -> None:
        raise FormatError(
            f"the chunk file {problem}; chunks of {list(m.inner)} {m.dtype} have {m.inner_bytes:,}",
            file=self._root / self._files[file].path,
            tensor=array.name,
            hint=_INCOMPLETE,
        )
