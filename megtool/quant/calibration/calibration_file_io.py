"""The artefact's file: named arrays and facts in one safetensors file, the same bytes each time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.digest import crc32c, refuse_constant
from megtool.checkpoint.formats.safetensors_header import (
    SafetensorsEntry,
    encode_header,
    read_header,
)
from megtool.checkpoint.storage.files import Files
from megtool.dtypes import dtype as named
from megtool.errors import CalibrationError, FormatError

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_KEY = "megtool_calibration"
_STEP = 64 << 20


def write(path: Path, arrays: Arrays, facts: Mapping[str, Any], files: Files | None = None) -> None:
    """Write a file beside its place, make it durable, and rename it: it is there whole or not.

    Arrays are in the order of their names, facts in that of their keys, so equal contents are equal
    bytes.

    Raises:
        StorageError: the disk is full, or refuses otherwise; nothing is left behind.
    """
    files = Files() if files is None else files
    entries, at = [], 0
    flat = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    for name, array in flat.items():
        kind = named(array.dtype.name)
        entries.append(SafetensorsEntry(name, kind, array.shape, at, at + array.nbytes))
        at += array.nbytes
    said = {"crc32c": [crc_of(array) for array in flat.values()], "facts": facts}
    said = json.loads(_text(said))  # as it comes back
    text = _text({**said, "sealed": _seal(entries, said)})
    header = encode_header(entries, {_KEY: text}, str(path))
    place = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = files.open_write(place)
    try:
        files.truncate(fd, 0)
        files.pwrite_all(fd, header, 0)
        at = len(header)
        for array in flat.values():
            if array.nbytes:
                files.pwrite_all(fd, array.reshape(-1).view(np.uint8), at)
            at += array.nbytes
        files.do(fd, "flush", os.fsync, fd)
    except BaseException:
        files.close(fd)
        files.remove(place)
        raise
    files.close(fd)
    files.rename(place, path)
    files.fsync_dir(path.parent)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Facts and arrays of a file, the arrays mapped from it and not to be written.

    Raises:
        CalibrationError: it is none, or not what was written.
    """
    hint = "calibrate again; a file written by `megtool quantize --calibrate-only` is expected"
    try:
        size = path.stat().st_size
        header = read_header(path, size)
        said = json.loads(header.metadata[_KEY], parse_constant=refuse_constant)
        digests, facts = said["crc32c"], said["facts"]
        if not isinstance(facts, dict) or len(digests) != len(header.entries):
            raise ValueError("facts are missing")
        if "sealed" in said and said["sealed"] != _seal(header.entries, said):
            raise ValueError("facts or names are not what was written")
        whole = np.memmap(path, np.uint8, "c")
        arrays: dict[str, Array] = {}
        for entry, digest in zip(header.entries, digests, strict=True):
            part = whole[header.start + entry.begin : header.start + entry.end]
            if entry.dtype.name not in ("float32", "float64", "int64", "int8"):
                raise ValueError(f"{entry.name!r} is of {entry.dtype.name}")
            if crc_of(part) != digest:
                raise ValueError(f"{entry.name!r} is not what was written")
            arrays[entry.name] = part.view(entry.dtype.view).reshape(entry.shape)
    except OSError as e:
        raise CalibrationError(f"cannot be read: {e.strerror}", file=path, hint=hint) from e
    except FormatError as e:
        raise CalibrationError(e.message, file=path, hint=hint) from e
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        message = f"no calibration, or a damaged one: {e}"
        raise CalibrationError(message, file=path, hint=hint) from e
    return facts, arrays


def _seal(entries: Iterable[SafetensorsEntry], said: Mapping[str, Any]) -> int:
    """The CRC-32C of what arrays are called, and of all that is said, which no array's covers."""
    names = [[e.name, e.dtype.name, list(e.shape)] for e in entries]
    return crc32c(_text([names, said["crc32c"], said["facts"]]).encode())


def _text(said: Any) -> str:
    return json.dumps(said, sort_keys=True, allow_nan=False, separators=(",", ":"))


def crc_of(array: Array) -> int:
    """The CRC-32C of an array's bytes, a part at a time."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.nbytes <= _STEP:
        return crc32c(flat.data)
    parts = [crc32c(flat[i : i + _STEP].data) for i in range(0, flat.nbytes, _STEP)]
    return crc32c(np.array(parts, "<u4").tobytes())
