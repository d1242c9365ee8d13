"""Megatron's indexed data sets, `.bin` and `.idx`: memory-mapped reading, and writing.

The layout is that of megatron.core.datasets.indexed_dataset, version 1, little-endian. The .bin
file holds the tokens of all sequences one after the other. The .idx file:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    1, the version
    uint8     the dtype's code
    uint64    n, the number of sequences
    uint64    m, the number of document indices, one more than documents
    int32[n]  tokens of each sequence
    int64[n]  where each sequence begins in the .bin file, in bytes
    int64[m]  0, then for each document the number of sequences up to its end
    int8[n]   the mode of each sequence; in multimodal data sets alone
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megtool.data.dataset_writer import DATA, INDEX, add_suffix, dataset_prefix
from megtool.errors import FormatError, StorageError, UsageError
from megtool.storage.local_copy import map_file
from megtool.storage.location.path import location

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_SMALL_VOCABULARY = 65500
_CHUNK = 1 << 20

Tokens = NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype Megatron stores tokens of such a vocabulary in: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")


class IndexedDataset:
    """A data set of tokens on disk: `dataset[i]` is sequence i, a view of the mapped file.

    `lengths` are tokens and `offsets` bytes of each sequence, `document_ends` the number of
    sequences up to the end of each document after a leading 0, `modes` are None in data sets that
    are not multimodal. Nothing but headers is in memory; all of the index is checked on opening.

    Raises:
        FormatError: a file that is cut off, too long or inconsistent; it names the file.
        StorageError: a file cannot be read.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open `prefix`.bin and `prefix`.idx; either name of the two will do as well."""
        self.prefix = dataset_prefix(location(prefix))
        self.index_file, self.data_file = _paths(self.prefix)
        raw = _mapped(self.index_file)
        if len(raw) < _HEAD.size:
            raise FormatError(f"{len(raw)} bytes are not an index", file=self.index_file)
        magic, version, code, n, m = _HEAD.unpack(raw[: _HEAD.size].tobytes())
        if magic != _MAGIC:
            raise FormatError(
                f"not a Megatron index: it begins with {magic!r}",
                file=self.index_file,
                hint="`megtool tokenize` makes one from text",
            )
        if version != 1:
            raise FormatError(f"version {version} of an index, 1 is known", file=self.index_file)
        if code not in _DTYPES:
            raise FormatError(f"dtype code {code}, 1 to 8 are known", file=self.index_file)
        needed = _HEAD.size + 12 * n + 8 * m
        if len(raw) not in (needed, needed + n):
            raise FormatError(
                f"{len(raw)} bytes, and {n} sequences with {m} document indices need {needed}",
                file=self.index_file,
                hint="the file is truncated or was changed: tokenize again",
            )
        self.dtype: np.dtype[Any] = np.dtype(_DTYPES[code])
        offset = _HEAD.size
        self.lengths: NDArray[np.int32] = raw[offset : offset + 4 * n].view("<i4")
        offset += 4 * n
        self.offsets: NDArray[np.int64] = raw[offset : offset + 8 * n].view("<i8")
        offset += 8 * n
        self.document_ends: NDArray[np.int64] = raw[offset : offset + 8 * m].view("<i8")
        offset += 8 * m
        self.modes: NDArray[np.int8] | None = (
            raw[offset:].view("i1") if n and len(raw) > needed else None
        )
        self._data = _mapped(self.data_file)
        self.num_tokens = self._check()

    def _check(self) -> int:
        """Hold the index against the data, some of it at a time; the number of all tokens."""
        size, total = len(self._data), 0
        for start in range(0, len(self), _CHUNK):
            lengths = self.lengths[start : start + _CHUNK].astype(np.int64)
            offsets = self.offsets[start : start + _CHUNK]
            ends = offsets + lengths * self.dtype.itemsize
            wrong = (lengths < 0) | (offsets < 0) | (ends > size) | (ends < offsets)
            if wrong.any():
                i = start + int(np.argmax(wrong))
                raise FormatError(
                    f"sequence {i} of {self.lengths[i]} tokens at byte {self.offsets[i]} lies "
                    f"outside the {size} bytes of {self.data_file.name}",
                    file=self.index_file,
                    hint="the two files belong together: take both from one run",
                )
            total += int(lengths.sum())
        marks = self.document_ends
        sound = len(marks) > 0 and marks[0] == 0 and marks[-1] == len(self)
        for start in range(0, len(marks) - 1, _CHUNK):
            sound = sound and bool((np.diff(marks[start : start + _CHUNK + 1]) >= 0).all())
        if not sound:
            raise FormatError(
                f"document indices do not rise from 0 to {len(self)}, the number of sequences",
                file=self.index_file,
            )
        return total

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.document_ends) - 1

    def __getitem__(self, i: int) -> Tokens:
        """The tokens of sequence `i`, not to be written to."""
        begin = int(self.offsets[i])
        return self._data[begin : begin + int(self.lengths[i]) * self.dtype.itemsize].view(
            self.dtype
        )

    def document(self, i: int) -> Tokens:
        """The tokens of document `i`: its sequences one after the other."""
        if not 0 <= i < self.num_documents:
            raise IndexError(i)
        begin, end = int(self.document_ends[i]), int(self.document_ends[i + 1])
        if end == begin + 1:
            return self[begin]
        parts = [self[j] for j in range(begin, end)]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def documents(self) -> Iterator[Tokens]:
        """All documents in order."""
        return (self.document(i) for i in range(self.num_documents))


class IndexedWriter:
    """Writes a data set sequence by sequence; 4 bytes of memory a sequence, 8 a document.

    Used as a context: without an error inside it, the index is written at its end; after one,
    the data is there without an index, which nothing takes for a data set.

    Raises:
        StorageError: a file cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.generic]) -> None:
        """Write `prefix`.bin and `prefix`.idx, replacing what is there."""
        self.index_file, self.data_file = _paths(dataset_prefix(location(prefix)))
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise UsageError(f"dtype {dtype} is not supported by an index", hint="uint16 or int32")
        self._lengths, self._ends = array("i"), array("q", [0])
        self._modes: array[int] | None = None
        self.num_tokens = 0
        _remove(self.index_file)
        self._file = _open(self.data_file)

    def add(self, ids: Iterable[int] | Tokens, *, mode: int | None = None) -> None:
        """Append one sequence; `mode` is Megatron's mark of a multimodal one (all have it or none).

        Raises:
            UsageError: a token that the dtype cannot hold.
        """
        tokens = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
        if tokens.size and self.dtype.kind in "iu":
            room = np.iinfo(self.dtype)
            if tokens.min() < room.min or tokens.max() > room.max:
                outside = tokens.max() if tokens.max() > room.max else tokens.min()
                raise UsageError(
                    f"token {outside} does not fit into {self.dtype.name}",
                    hint="`token_dtype` chooses by the size of the vocabulary",
                )
        if (mode is not None) != (self._modes is not None) and self._lengths:
            raise UsageError("some sequences have a mode and some have none")
        if mode is not None:
            self._modes = self._modes if self._modes is not None else array("b")
            self._modes.append(mode)
        self._write(self._file, self.data_file, tokens.astype(self.dtype).tobytes())
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def end_document(self) -> None:
        """All sequences since the last call are one document."""
        self._ends.append(len(self._lengths))

    @property
    def num_documents(self) -> int:
        """How many documents have ended."""
        return len(self._ends) - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as e:
            if kind is None:
                raise StorageError(f"cannot write: {e.strerror}", file=self.data_file) from e
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        if self._ends[-1] != len(self._lengths):
            raise UsageError("the last sequences belong to no document", hint="end_document()")
        lengths = np.asarray(self._lengths, "<i4")
        offsets = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
        offsets *= self.dtype.itemsize
        head = _HEAD.pack(_MAGIC, 1, _CODES[self.dtype], len(lengths), len(self._ends))
        with _open(self.index_file) as file:
            self._write(file, self.index_file, head)
            for part in (lengths, offsets, np.asarray(self._ends, "<i8")):
                self._write(file, self.index_file, part.tobytes())
            if self._modes is not None:
                self._write(file, self.index_file, np.asarray(self._modes, "i1").tobytes())

    def _write(self, file: Any, path: Path, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror}", file=path) from e


def _paths(prefix: Path) -> tuple[Path, Path]:
    """The index and the data of a prefix."""
    return add_suffix(prefix, INDEX), add_suffix(prefix, DATA)


def _open(path: Path) -> Any:
    """A new file; what has its name is removed, so that no link is followed and no FIFO opened."""
    _remove(path)
    try:
        return path.open("xb", buffering=1 << 20)
    except OSError as e:
        raise StorageError(f"cannot write: {e.strerror}", file=path) from e


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise StorageError(f"cannot replace: {e.strerror}", file=path) from e


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file; an empty one cannot be mapped."""
    try:
        mapped = map_file(path)
        mapped.flags.writeable = False
        return mapped
    except OSError as e:
        raise StorageError(
            f"cannot read: {e.strerror}",
            file=path,
            hint="a data set is two files: PREFIX.bin and PREFIX.idx",
        ) from e
