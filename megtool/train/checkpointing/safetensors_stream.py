"""Safetensors files that are written and read one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megtool.dtypes import dtype
from megtool.errors import CheckpointError, FormatError, StorageError
from megtool.formats.safetensors.header import (
    SafetensorsEntry,
    encode_header,
    read_header,
)
from megtool.storage.files import Files


def write_safetensors(
    files: Files,
    path: Path,
    facts: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of tensors that come one at a time, with names and dtypes known in advance.

    Raises:
        StorageError: it cannot be written.
    """
    header, places = _header(facts, metadata)
    fd = files.open_write(path)
    try:
        files.truncate(fd, 0)
        files.pwrite_all(fd, header, 0)
        for place, tensor in zip(places, tensors, strict=True):
            files.pwrite_all(fd, _bytes(tensor), len(header) + place)
    finally:
        files.close(fd)


def _header(
    facts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The header of the file, and the offset of each tensor after it."""
    entries, offset = [], 0
    for name, kind, shape in facts:
        end = offset + math.prod(shape) * kind.itemsize
        named = dtype(str(kind).removeprefix("torch."))
        entries.append(SafetensorsEntry(name, named, shape, offset, end))
        offset = end
    return encode_header(entries, dict(metadata), "an adapter"), [e.begin for e in entries]


def _bytes(tensor: Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().tobytes()


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is accessed, and not cached.

    Raises:
        CheckpointError: the file does not exist.
        FormatError: it is not a safetensors file, or damaged.
        StorageError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._storage_errors():
            header = read_header(path, path.stat().st_size)
        self.metadata: Mapping[str, str] = header.metadata
        self._start = header.start
        self._entries = {entry.name: entry for entry in header.entries}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        data = bytearray(entry.end - entry.begin)
        with self._storage_errors(), self._path.open("rb") as file:
            file.seek(self._start + entry.begin)
            if file.readinto(data) != len(data):
                raise FormatError(
                    "the file ends before its last tensor",
                    file=self._path,
                    error_id="truncated-file",
                )
        kind = getattr(torch, entry.dtype.name)
        tensor = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        return tensor.view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as e:
            raise CheckpointError("the file does not exist", file=self._path) from e
        except OSError as e:
            raise StorageError(f"cannot read: {e.strerror or e}", file=self._path) from e
