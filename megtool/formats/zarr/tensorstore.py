"""OCDBT databases of zarr arrays, as tensorstore and Orbax write them, through tensorstore.

A database stores the keys of many arrays and the bytes of their chunks in a few large files:
`manifest.ocdbt` and `d/…`, with Orbax also below `ocdbt.process_N/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, MissingPackageError, StorageError
from megtool.formats.header_reader import check_inside, parse_json
from megtool.formats.zarr.chunks import ZarrArray, ZarrChunks
from megtool.formats.zarr.codecs import DecodeError
from megtool.formats.zarr.decoding import (
    MISSING,
    check_index,
    index_bytes,
    max_stored_bytes,
)
from megtool.formats.zarr.folder import MANIFEST, V2_NAME, V3_NAME
from megtool.formats.zarr.metadata import read_v2, read_v3
from megtool.formats.zarr.ocdbt_listing import database_spec, list_metadata, read_value
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.storage.local_copy import kept_copy
from megtool.tensors.catalogue import Catalogue, Destination, StoredFile
from megtool.tensors.sharded import GlobalTensor

_DATA = "d"
_IS_DATA = re.compile(r"(?:ocdbt\.process_[^/]+/)?(?:d/.+|manifest\.ocdbt)")
LIBRARY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # includes NotImplementedError
    TypeError,
    ValueError,
)
"""What tensorstore raises for invalid bytes or metadata."""

_BATCH_BYTES = 64 << 20
"""Values written together: the limit of values in memory."""


def open_database(folder: Path) -> Catalogue:
    """The catalogue of all zarr arrays in a database, v2 and v3; every chunk is encoded.

    Raises:
        FormatError: the database is damaged, or has no array.
        MissingPackageError: tensorstore is not installed.
    """
    files = _list_files(folder)
    readable = kept_copy(folder, tuple(files))  # tensorstore has no client of every store
    manifest = next(i for i, f in enumerate(files) if f.path == MANIFEST)
    arrays = [
        ZarrArray(
            name=key or folder.name,
            folder=key,
            metadata=read(parse_json(data, folder / MANIFEST), file=folder / MANIFEST / key),
            metadata_file=manifest,
            files={},
            in_database=True,
        )
        for key, read, data in _stored_metadata(folder, readable)
    ]
    if not arrays:
        raise FormatError(
            "the database has no zarr array", file=folder, error_id="not-a-checkpoint"
        )
    chunks = ZarrChunks(folder, files, arrays, _DatabaseReader(readable))
    catalogue = Catalogue(
        format="ocdbt",
        root=folder,
        files=files,
        tensors=[
            GlobalTensor(name=a.name, shape=a.metadata.shape, dtype=a.metadata.dtype)
            for a in arrays
        ],
        shards=chunks.shards,
        extents=chunks.extents,
        locate_contained=chunks.locate,
        encoded_chunks=chunks.encoded_chunks,
    )
    catalogue.check()
    return catalogue


def write_database(destination: Destination, stage: Stage) -> None:
    """Move the arrays of a staged zarr v3 folder into a database in the same folder.

    Every file of an array becomes the value of its path, and is then removed. If the run is stopped
    here, the next one writes the removed files again and restarts the database.

    Raises:
        MissingPackageError: tensorstore is not installed.
        StorageError: a read or a write failed.
    """
    ts, files = tensorstore_package(), stage.files
    for name in (MANIFEST, _DATA):
        files.remove(stage.tree / name)
    metadata_files = [
        n for n, _ in destination.iter_small_files() if n.rpartition("/")[2] == V3_NAME
    ]
    pending: list[tuple[Path, Any]] = []
    pending_bytes = 0
    try:
        store = ts.KvStore.open(database_spec(stage.tree)).result()
        for name in [*metadata_files, *(f.path for f in destination.catalogue.files)]:
            path = stage.path(name)
            value = path.read_bytes()
            pending.append((path, store.write(name, value)))
            pending_bytes += len(value)
            if pending_bytes >= _BATCH_BYTES:
                _flush(files, pending)
                pending_bytes = 0
        _flush(files, pending)
    except LIBRARY_ERRORS as e:
        raise StorageError(
            f"the database could not be written: {str(e)[:200]}", file=stage.tree / MANIFEST
        ) from e
    for folder in reversed(files.tree(stage.tree)[1]):
        if folder != stage.tree:
            files.remove_empty(folder)


def _flush(files: Files, pending: list[tuple[Path, Any]]) -> None:
    """Wait until values are in the database, then remove their files."""
    for path, write in pending:
        write.result()
        files.remove(path)
    pending.clear()


def _list_files(folder: Path) -> list[StoredFile]:
    paths = [p.relative_to(folder).as_posix() for p in Files().tree(folder)[0]]
    database_files = [p for p in sorted(paths) if p == MANIFEST or _IS_DATA.fullmatch(p)]
    for path in database_files:
        check_inside(folder, path)
    return [StoredFile.stat(folder, path) for path in database_files]


def _stored_metadata(folder: Path, readable: Path) -> list[tuple[str, Callable[..., Any], bytes]]:
    """The keys of all arrays, the functions that parse their metadata, and the metadata.

    `readable` is the database on this machine.
    """
    tensorstore_package()
    out: list[tuple[str, Callable[..., Any], bytes]] = []
    for name, data in list_metadata(folder, MANIFEST, readable=readable):
        key, _, last = name.rpartition("/")
        if last == V3_NAME and b'"group"' in data:
            node = parse_json(data, folder / MANIFEST)
            if isinstance(node, dict) and node.get("node_type") == "group":
                continue
        out.append((key, read_v2 if last == V2_NAME else read_v3, data))
    return out


class _DatabaseReader:
    """Reads the stored bytes of chunks from a database, at most as many as they may have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: Any = None
        self._last_index: tuple[str, NDArray[np.uint64]] | None = None

    def __call__(
        self, array: ZarrArray, position: Sequence[int], extent: tuple[Path, int, int]
    ) -> bytes | None:
        m = array.metadata
        per = [c // i for c, i in zip(m.chunk, m.inner, strict=True)]
        shard = tuple(p // n for p, n in zip(position, per, strict=True))
        key = f"{array.folder}/{m.key(shard)}" if array.folder else m.key(shard)
        most = max_stored_bytes(m)
        if m.index is None:
            return self._read(lambda store: read_value(store, key, most))
        index = self._index(array, key, tuple(per))
        if index is None:
            return None
        offset, length = index[tuple(p % n for p, n in zip(position, per, strict=True))].tolist()
        if offset == MISSING and length == MISSING:
            return None
        if length > most or offset + length >= 1 << 63:
            raise DecodeError(f"a chunk of {length:,} bytes at {offset:,} of a shard")
        return self._read_range(key, slice(offset, offset + length))

    def _index(
        self, array: ZarrArray, key: str, counts: tuple[int, ...]
    ) -> NDArray[np.uint64] | None:
        """Offset and length of every inner chunk of a shard; None if the shard is missing."""
        last, index = self._last_index, array.metadata.index
        if last is not None and last[0] == key:
            return last[1]
        if index is None:
            return None
        num_bytes = index_bytes(counts, index)
        data = self._read_range(key, slice(-num_bytes, None) if index.at_end else slice(num_bytes))
        if data is None:
            return None
        entries = check_index(data, counts, index)
        self._last_index = key, entries
        return entries

    def _read_range(self, key: str, part: slice) -> bytes | None:
        def read(store: Any) -> bytes | None:
            result = store.read(key, byte_range=part).result()
            return bytes(result.value) if result.state == "value" else None

        return self._read(read)

    def _read(self, read: Callable[[Any], bytes | None]) -> bytes | None:
        try:
            if self._store is None:
                spec = database_spec(self._folder)
                self._store = tensorstore_package().KvStore.open(spec).result()
            return read(self._store)
        except LIBRARY_ERRORS as e:
            raise DecodeError(f"the database cannot be read: {str(e)[:200]}") from e


def tensorstore_package() -> Any:
    """Import tensorstore.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import tensorstore
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "OCDBT databases need tensorstore", hint="pip install 'megtool[zarr]'"
        ) from e
    return tensorstore
