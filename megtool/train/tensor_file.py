"""Tensor file: a few tensors as the bytes of a safetensors file, and read from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megtool.checkpoint.formats.safetensors_header import (
    SafetensorsEntry,
    encode_header,
    read_header,
)
from megtool.dtypes import dtype
from megtool.errors import CheckpointError, StorageError


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file, its tensors in the order of their names."""
    entries, parts, at = [], [], 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = dtype(str(tensor.dtype).removeprefix("torch."))
        entries.append(SafetensorsEntry(name, kind, tuple(tensor.shape), at, at + len(data)))
        parts.append(data)
        at += len(data)
    return b"".join([encode_header(entries, dict(metadata), "an adapter"), *parts])


def decode(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """The tensors of a file, and what is said beside them.

    Raises:
        CheckpointError: there is none.
        FormatError: it is no such file, or a damaged one.
        StorageError: it cannot be read.
    """
    try:
        header = read_header(path, path.stat().st_size)
        with path.open("rb") as file:
            file.seek(header.start)
            data = bytearray(file.read())
    except FileNotFoundError as e:
        raise CheckpointError("it is not there", file=path) from e
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
    out = {}
    for entry in header.entries:
        count = (entry.end - entry.begin) // entry.dtype.itemsize
        kind = getattr(torch, entry.dtype.name)
        held = torch.frombuffer(data, dtype=kind, count=count, offset=entry.begin)
        out[entry.name] = held.view(entry.shape)
    return out, header.metadata
