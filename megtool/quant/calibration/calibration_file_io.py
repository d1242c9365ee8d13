"""Reading and writing calibration files: arrays and JSON data in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.digests.crc32c import crc32c, reject_constant
from megtool.dtypes import dtype as named
from megtool.errors import CalibrationError, FormatError
from megtool.formats.safetensors.header import (
    SafetensorsEntry,
    encode_header,
    read_header,
)
from megtool.staging.store.object_upload import upload_object
from megtool.storage.files import Files
from megtool.storage.local_copy import map_file
from megtool.storage.location.path import StorePath

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_KEY = "megtool_calibration"
_CHUNK_BYTES = 64 << 20


def write(path: Path, arrays: Arrays, facts: Mapping[str, Any], files: Files | None = None) -> None:
    """Write a file atomically: to a temporary file, fsync, rename; or an object in parts.

    Arrays and JSON keys are sorted, so equal contents give equal bytes.

    Raises:
        StorageError: it cannot be written; the temporary file or the upload is removed.
    """
    files = Files() if files is None else files
    entries, offset = [], 0
    flat = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    for name, array in flat.items():
        kind = named(array.dtype.name)
        entries.append(SafetensorsEntry(name, kind, array.shape, offset, offset + array.nbytes))
        offset += array.nbytes
    metadata = {"crc32c": [array_crc32c(array) for array in flat.values()], "facts": facts}
    metadata = json.loads(_to_json(metadata))  # normalized as JSON
    text = _to_json({**metadata, "sealed": _seal(entries, metadata)})
    header = encode_header(entries, {_KEY: text}, str(path))
    pieces: list[bytes | Array] = [
        header,
        *(a.reshape(-1).view(np.uint8) for a in flat.values() if a.nbytes),
    ]
    if isinstance(path, StorePath):
        num_bytes = sum(_num_bytes(piece) for piece in pieces)
        upload_object(path, num_bytes, lambda fd: _write_pieces(fd, pieces, files), files)
    else:
        _replace(path, pieces, files)


def _replace(path: Path, pieces: Sequence[bytes | Array], files: Files) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = files.open_write(temporary)
    try:
        files.truncate(fd, 0)
        _write_pieces(fd, pieces, files)
        files.call(fd, "flush", os.fsync, fd)
    except BaseException:
        files.close(fd)
        files.remove(temporary)
        raise
    files.close(fd)
    files.rename(temporary, path)
    files.fsync_dir(path.parent)


def _num_bytes(piece: bytes | Array) -> int:
    return piece.nbytes if isinstance(piece, np.ndarray) else len(piece)


def _write_pieces(fd: int, pieces: Sequence[bytes | Array], files: Files) -> None:
    offset = 0
    for piece in pieces:
        files.pwrite_all(fd, piece, offset)
        offset += _num_bytes(piece)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read the JSON data and the arrays of a file; the arrays are memory-mapped.

    Raises:
        CalibrationError: not a calibration file, or a damaged one.
    """
    hint = "calibrate again; a file written by `megtool quantize --calibrate-only` is expected"
    try:
        size = path.stat().st_size
        header = read_header(path, size)
        metadata = json.loads(header.metadata[_KEY], parse_constant=reject_constant)
        digests, facts = metadata["crc32c"], metadata["facts"]
        if not isinstance(facts, dict) or len(digests) != len(header.entries):
            raise ValueError("facts are missing")
        if "sealed" in metadata and metadata["sealed"] != _seal(header.entries, metadata):
            raise ValueError("checksum mismatch in metadata")
        data = map_file(path)
        arrays: dict[str, Array] = {}
        for entry, digest in zip(header.entries, digests, strict=True):
            part = data[header.start + entry.begin : header.start + entry.end]
            if entry.dtype.name not in ("float32", "float64", "int64", "int8"):
                raise ValueError(f"{entry.name!r} has dtype {entry.dtype.name}")
            if array_crc32c(part) != digest:
                raise ValueError(f"checksum mismatch in {entry.name!r}")
            arrays[entry.name] = part.view(entry.dtype.view).reshape(entry.shape)
    except OSError as e:
        raise CalibrationError(f"cannot be read: {e.strerror}", file=path, hint=hint) from e
    except FormatError as e:
        raise CalibrationError(e.message, file=path, hint=hint, error_id=e.error_id) from e
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        message = f"not a calibration file, or a damaged one: {e}"
        raise CalibrationError(message, file=path, hint=hint) from e
    return facts, arrays


def _seal(entries: Iterable[SafetensorsEntry], metadata: Mapping[str, Any]) -> int:
    """The CRC-32C of the names of arrays and of all metadata, which no array digest covers."""
    names = [[e.name, e.dtype.name, list(e.shape)] for e in entries]
    return crc32c(_to_json([names, metadata["crc32c"], metadata["facts"]]).encode())


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def array_crc32c(array: Array) -> int:
    """Compute the CRC-32C of an array's bytes, chunk by chunk."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.nbytes <= _CHUNK_BYTES:
        return crc32c(flat.data)
    parts = [crc32c(flat[i : i + _CHUNK_BYTES].data) for i in range(0, flat.nbytes, _CHUNK_BYTES)]
    return crc32c(np.array(parts, "<u4").tobytes())
