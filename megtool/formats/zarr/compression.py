"""Compresses zarr chunks after they are written: files are rewritten in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.digests.crc32c import crc32c
from megtool.dtypes import DType
from megtool.errors import MissingPackageError, UsageError
from megtool.process.threads import map_in_threads
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.tensors.catalogue import Destination

COMPRESSIONS = ("zstd", "blosc")
_ZSTD_LEVEL = 3
_BLOSC = {"cname": "zstd", "clevel": 3}

Encode = Callable[[NDArray[Any]], Any]


def codec_metadata(compression: str, dtype: DType) -> dict[str, Any]:
    """The metadata of a codec.

    Raises:
        UsageError: the compression is unknown.
    """
    if compression == "zstd":
        settings: dict[str, Any] = {"level": _ZSTD_LEVEL, "checksum": False}
    elif compression == "blosc":
        shuffle = {"shuffle": "shuffle", "typesize": dtype.itemsize, "blocksize": 0}
        settings = _BLOSC | shuffle
    else:
        raise UsageError(
            f"the compression {compression!r} is unknown", hint=f"known: {', '.join(COMPRESSIONS)}"
        )
    return {"name": compression, "configuration": settings}


def compress(destination: Destination, stage: Stage, compression: str, *, threads: int = 1) -> int:
    """Compress all chunks of a `plan_zarr_layout(compress=...)` whose raw bytes are in the stage;
    returns the number of bytes saved.

    Memory is two chunks per thread. If the run is stopped here, the rewritten files differ from the
    raw bytes that the next run expects, and are written again.

    Raises:
        MissingPackageError: numcodecs is not installed.
        StorageError: a read or a write failed.
    """
    catalogue = destination.catalogue
    indexes = {file: (offset, data) for file, offset, data in destination.fragments}
    owner = {
        int(f): int(t) for f, t in zip(catalogue.extents.file, catalogue.shards.tensor, strict=True)
    }

    def compress_file(number: int) -> int:
        file, dtype = catalogue.files[number], catalogue.tensors[owner[number]].dtype
        fd = stage.files.open_write(stage.path(file.path))
        try:
            end = _rewrite(
                stage.files, fd, file.size, indexes.get(number), _encoder(compression, dtype)
            )
            stage.files.truncate(fd, end)
        finally:
            stage.files.close(fd)
        return file.size - end

    return sum(map_in_threads(compress_file, range(len(catalogue.files)), threads=threads))


def _rewrite(
    files: Files, fd: int, size: int, index: tuple[int, bytes] | None, encode: Encode
) -> int:
    """Replace raw chunks by encoded ones; returns the new size of the file.

    Nothing is overwritten before it is read: chunks that grow are buffered.
    """
    extents = [(0, size)]
    table = np.zeros((1, 2), "<u8")
    if index is not None:
        table = np.frombuffer(index[1][:-4], "<u8").reshape(-1, 2).copy()
        extents = [(int(a), int(n)) for a, n in table.tolist()]
    pending = bytearray()
    written = end = 0
    for k, (offset, length) in enumerate(extents):
        if offset >= 1 << 63:  # a chunk outside the array
            continue
        raw = np.empty(length, np.uint8)
        files.pread_into(fd, raw, offset)
        data = encode(raw)
        table[k] = end, len(data)
        end += len(data)
        pending += data
        writable = min(len(pending), offset + length - written)
        files.pwrite_all(fd, bytes(pending[:writable]), written)
        written += writable
        del pending[:writable]
    if index is not None:
        entries = table.tobytes()
        pending += entries + crc32c(entries).to_bytes(4, "little")
    files.pwrite_all(fd, bytes(pending), written)
    return written + len(pending)


def _encoder(compression: str, dtype: DType) -> Encode:
    try:
        import numcodecs
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            f"compression by {compression} needs numcodecs", hint="pip install 'megtool[zarr]'"
        ) from e
    if compression == "zstd":
        encode: Encode = numcodecs.Zstd(level=_ZSTD_LEVEL).encode
        return encode
    blosc = numcodecs.Blosc(shuffle=numcodecs.Blosc.SHUFFLE, **_BLOSC)
    return lambda raw: blosc.encode(raw.view(f"<u{dtype.itemsize}"))
