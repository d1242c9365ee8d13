"""Compression of zarr chunks once they are written: files rewritten in place, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.digest import crc32c
from megtool.checkpoint.storage.files import Files
from megtool.dtypes import DType
from megtool.errors import MissingPackageError, UsageError

COMPRESSIONS = ("zstd", "blosc")
_ZSTD_LEVEL = 3
_BLOSC = {"cname": "zstd", "clevel": 3}

Encode = Callable[[NDArray[Any]], Any]


def codec(how: str, dtype: DType) -> dict[str, Any]:
    """The metadata of a codec.

    Raises:
        UsageError: there is none of this name.
    """
    if how == "zstd":
        settings: dict[str, Any] = {"level": _ZSTD_LEVEL, "checksum": False}
    elif how == "blosc":
        more = {"shuffle": "shuffle", "typesize": dtype.itemsize, "blocksize": 0}
        settings = _BLOSC | more
    else:
        raise UsageError(f"unknown compression {how!r}", hint=f"known: {', '.join(COMPRESSIONS)}")
    return {"name": how, "configuration": settings}


def compress(destination: Destination, stage: Stage, how: str, *, threads: int = 1) -> int:
    """Compress all chunks of a checkpoint that `lay_out(compress=how)` laid out and whose raw bytes
    are in the stage; the number of bytes saved.

    Memory is two chunks a thread. A run that is stopped here loses nothing: what it rewrote differs
    from the raw bytes that the next run expects of finished parts, and is written again.

    Raises:
        MissingPackageError: numcodecs is not installed.
        StorageError: a read or a write failed.
    """
    found = destination.catalogue
    indexes = {file: (offset, data) for file, offset, data in destination.fragments}
    owner = {int(f): int(t) for f, t in zip(found.extents.file, found.shards.tensor, strict=True)}

    def one(number: int) -> int:
        file, dtype = found.files[number], found.tensors[owner[number]].dtype
        fd = stage.files.open_write(stage.path(file.path))
        try:
            end = _rewrite(stage.files, fd, file.size, indexes.get(number), _encoder(how, dtype))
            stage.files.truncate(fd, end)
        finally:
            stage.files.close(fd)
        return file.size - end

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return sum(pool.map(one, range(len(found.files))))


def _rewrite(
    files: Files, fd: int, size: int, index: tuple[int, bytes] | None, encode: Encode
) -> int:
    """Replace raw chunks by encoded ones; the new size of the file.

    Nothing is overwritten before it is read: what has no room yet (chunks that grow) waits.
    """
    places = [(0, size)]
    table = np.zeros((1, 2), "<u8")
    if index is not None:
        table = np.frombuffer(index[1][:-4], "<u8").reshape(-1, 2).copy()
        places = [(int(a), int(n)) for a, n in table.tolist()]
    waiting = bytearray()
    written = end = 0
    for k, (offset, length) in enumerate(places):
        if offset >= 1 << 63:  # a chunk outside the array
            continue
        raw = np.empty(length, np.uint8)
        files.pread_into(fd, raw, offset)
        data = encode(raw)
        table[k] = end, len(data)
        end += len(data)
        waiting += data
        ready = min(len(waiting), offset + length - written)
        files.pwrite_all(fd, bytes(waiting[:ready]), written)
        written += ready
        del waiting[:ready]
    if index is not None:
        entries = table.tobytes()
        waiting += entries + crc32c(entries).to_bytes(4, "little")
    files.pwrite_all(fd, bytes(waiting), written)
    return written + len(waiting)


def _encoder(how: str, dtype: DType) -> Encode:
    try:
        import numcodecs
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            f"compression by {how} needs numcodecs", hint="pip install 'zarr>=3.1'"
        ) from e
    if how == "zstd":
        encode: Encode = numcodecs.Zstd(level=_ZSTD_LEVEL).encode
        return encode
    blosc = numcodecs.Blosc(shuffle=numcodecs.Blosc.SHUFFLE, **_BLOSC)
    return lambda raw: blosc.encode(raw.view(f"<u{dtype.itemsize}"))
