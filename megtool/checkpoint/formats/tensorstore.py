"""OCDBT databases of zarr arrays, as tensorstore and Orbax write them, through tensorstore.

A database stores the keys of many arrays and the bytes of their chunks in a few large files:
`manifest.ocdbt` and `d/…`, with Orbax also below `ocdbt.process_N/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue, Destination, StoredFile
from megtool.checkpoint.commit import StagingFolder
from megtool.checkpoint.formats.header_reader import check_inside, parse_json
from megtool.checkpoint.formats.zarr_chunks import ZarrArray, ZarrChunks
from megtool.checkpoint.formats.zarr_decoding import (
    LIBRARY_ERRORS,
    ChunkDecoder,
    open_tensorstore,
    tensorstore_package,
)
from megtool.checkpoint.formats.zarr_metadata import V2_NAME, V3_NAME, read_v2, read_v3
from megtool.checkpoint.storage.files import Files
from megtool.errors import FormatError, StorageError
from megtool.tensors.sharded import GlobalTensor

MANIFEST = "manifest.ocdbt"
_DATA = "d"
_MAX_JSON_BYTES = 64 << 20
_IS_DATA = re.compile(r"(?:ocdbt\.process_[^/]+/)?(?:d/.+|manifest\.ocdbt)")
_BATCH_BYTES = 64 << 20
"""Values written together: the limit of values in memory."""


def is_database(folder: Path) -> bool:
    """Whether a folder is an OCDBT database."""
    return (folder / MANIFEST).is_file()


def open_database(folder: Path) -> Catalogue:
    """The catalogue of all zarr arrays in a database, v2 and v3; every chunk is encoded.

    Raises:
        FormatError: the database is damaged, or has no array.
        MissingPackageError: tensorstore is not installed.
    """
    files = _list_files(folder)
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
        for key, read, data in _stored_metadata(folder)
    ]
    if not arrays:
        raise FormatError("the database has no zarr array", file=folder)
    chunks = ZarrChunks(folder, files, arrays, _DatabaseDecoder(folder))
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


def write_database(destination: Destination, stage: StagingFolder) -> None:
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
        store = ts.KvStore.open(_database(stage.tree)).result()
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
    """All files of the database."""
    paths = [p.relative_to(folder).as_posix() for p in Files().tree(folder)[0]]
    database_files = [p for p in sorted(paths) if p == MANIFEST or _IS_DATA.fullmatch(p)]
    for path in database_files:
        check_inside(folder, path)
    return [StoredFile.stat(folder, path) for path in database_files]


def _stored_metadata(folder: Path) -> list[tuple[str, Callable[..., Any], bytes]]:
    """The keys of all arrays, the functions that parse their metadata, and the metadata."""
    ts = tensorstore_package()
    out: list[tuple[str, Callable[..., Any], bytes]] = []
    try:
        store = ts.KvStore.open(_database(folder)).result()
        for name in sorted(key.decode() for key in store.list().result()):
            key, _, last = name.rpartition("/")
            if last not in (V2_NAME, V3_NAME):
                continue
            data = bytes(store.read(name).result().value)
            if len(data) > _MAX_JSON_BYTES:
                raise ValueError(f"metadata of {len(data):,} bytes")
            if last == V3_NAME and b'"group"' in data:
                node = parse_json(data, folder / MANIFEST)
                if isinstance(node, dict) and node.get("node_type") == "group":
                    continue
            out.append((key, read_v2 if last == V2_NAME else read_v3, data))
    except LIBRARY_ERRORS as e:
        raise FormatError(
            f"the database cannot be read: {str(e)[:200]}",
            file=folder / MANIFEST,
            hint="copy the whole folder: the manifest refers to other files in it",
        ) from e
    return out


def _database(folder: Path, key: str = "") -> dict[str, Any]:
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{key}/" if key else ""}


class _DatabaseDecoder(ChunkDecoder):
    """Reads boxes of the arrays of a database."""

    def _open(self, array: ZarrArray) -> Callable[[tuple[slice, ...]], NDArray[Any]]:
        driver = "zarr" if array.metadata.version == 2 else "zarr3"
        return open_tensorstore({"driver": driver, "kvstore": _database(self._root, array.folder)})
