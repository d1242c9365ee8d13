"""Folders of arrays, one per tensor: zarr v2 and v3 (`zarr`), and formats of tensorstore.

`zarr` is also Megatron's old backend, an array `iter_X/KEY/.zarray` per tensor. `tensorstore` are
zarr v3 folders with element types that zarr-python does not know; `ocdbt` are databases of arrays.
Opening reads metadata, file names and the indexes of shards. Chunks of raw elements are ordinary
extents; encoded ones are decoded in bounded memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megtool.errors import FormatError, StorageError
from megtool.formats.auxiliary_files import can_copy, list_files
from megtool.formats.header_reader import (
    check_inside,
    list_names,
    parse_json,
    read_exact,
    short_repr,
)
from megtool.formats.save_folder import RELEASE
from megtool.formats.zarr import tensorstore
from megtool.formats.zarr.chunks import ZarrArray, ZarrChunks
from megtool.formats.zarr.folder import (
    COMMON,
    V2_NAME,
    V3_NAME,
    detect,
    find_array_folder,
    is_database,
    is_unfinished,
    saved_backend,
)
from megtool.formats.zarr.layout import OBJECTS, plan_zarr_layout
from megtool.formats.zarr.metadata import (
    ONLY_TENSORSTORE,
    ArrayMetadata,
    read_v2,
    read_v3,
)
from megtool.pickles import reader as pickle_reader
from megtool.pickles import zip_reader
from megtool.storage.files import Files, is_regular_file, opened
from megtool.storage.location.path import is_remote
from megtool.tensors.catalogue import Catalogue, Extents, StoredFile, StoredObject
from megtool.tensors.sharded import GlobalTensor, Shards

__all__ = ["NAMES", "detect", "open_checkpoint", "plan_zarr_layout"]

NAMES = ("zarr", "tensorstore", "ocdbt")

MAX_DEPTH = 16
_MAX_JSON_BYTES = 1 << 30
_MAX_COMMON_BYTES = 1 << 30
_AUXILIARY_FOLDERS = ("hf", "tokenizer")
_AUXILIARY_FILES = ("run_config.yaml",)
_METADATA_KEYS = ("args", "iteration", "checkpoint_version", "content_metadata")


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of a folder of arrays; `iteration` chooses one of a save folder.

    Tensors are named by the path of their array inside the folder. `metadata` gets `common` and
    its values (see torch_dist) if there is a `common.pt`. Objects of kind `object` are stored
    directly, those of kind `bytes` as lists of one.

    Raises:
        FormatError: metadata or chunk files are missing or invalid, or a name leaves the folder.
        CoverageError: chunks do not tile their tensors.
    """
    folder = find_array_folder(path, iteration)
    if is_database(folder):
        catalogue = tensorstore.open_database(folder)
        _FolderScan(catalogue, void_is_bfloat16=False).walk("", 0)
        _add_common(catalogue)
        return catalogue
    if is_unfinished(folder):
        raise FormatError(
            "an unfinished save: metadata.json is missing, which is written last",
            file=folder,
            hint="choose another iteration, or save again",
            error_id="unfinished-save",
        )
    backend = saved_backend(folder)
    none = np.zeros(0, np.int64)
    catalogue = Catalogue(
        format="zarr",
        root=folder,
        files=[],
        tensors=[],
        shards=Shards.build([], 1),
        extents=Extents(file=np.zeros(0, np.int32), offset=none, length=none),
    )
    scan = _FolderScan(catalogue, void_is_bfloat16=backend == "zarr")
    scan.walk("", 0)
    if not scan.arrays:
        raise FormatError(
            "there is no zarr array in this folder", file=folder, error_id="not-a-checkpoint"
        )
    arrays = sorted(scan.arrays, key=lambda a: a.name)
    chunks = ZarrChunks(folder, catalogue.files, arrays)
    _check_complete(folder, arrays, chunks, megatron=backend == "zarr")
    if any(
        a.metadata.version == 3 and a.metadata.dtype.name in ONLY_TENSORSTORE
        for a in arrays
        if not a.metadata.is_zarr_python_dtype
    ):
        catalogue.format = "tensorstore"
    catalogue.tensors = [
        GlobalTensor(name=a.name, shape=a.metadata.shape, dtype=a.metadata.dtype) for a in arrays
    ]
    catalogue.shards, catalogue.extents = chunks.shards, chunks.extents
    catalogue.locate_contained, catalogue.encoded_chunks = chunks.locate, chunks.encoded_chunks
    catalogue.check()
    _add_common(catalogue)
    return catalogue


def _check_complete(
    folder: Path, arrays: list[ZarrArray], chunks: ZarrChunks, *, megatron: bool
) -> None:
    """Refuse missing chunks in Megatron's checkpoints, which always contain all chunks."""
    if not megatron:
        return
    missing = Counter(chunks.missing_tensors())
    for number, count in missing.items():
        raise FormatError(
            f"{count} chunk files are missing",
            file=folder / arrays[number].folder,
            tensor=arrays[number].name,
            hint="the save was not finished, or not all of it was copied",
            error_id="missing-shard",
        )


@dataclass(slots=True)
class _FolderScan:
    """Collects the arrays of a folder, and adds its objects and other files to a catalogue."""

    catalogue: Catalogue
    void_is_bfloat16: bool
    arrays: list[ZarrArray] = field(default_factory=list)

    def walk(self, folder: str, depth: int) -> None:
        """Add a folder, given by its path below the root, and everything in it."""
        if depth > MAX_DEPTH:
            raise FormatError(f"folders are nested {depth} deep", file=self.catalogue.root / folder)
        entries = dict(self._scan(folder))
        if not depth:
            self._prefetch_metadata(entries)
        metadata = self._metadata(folder, entries)
        if metadata is not None:
            self._add_array(folder, *metadata)
            return
        for name, is_folder in sorted(entries.items()):
            path = f"{folder}/{name}" if folder else name
            if is_folder:
                if path in _AUXILIARY_FOLDERS:
                    self._add_auxiliary_files(list_files(self.catalogue.root / path))
                elif not name.startswith("."):
                    self.walk(path, depth + 1)
            elif path in _AUXILIARY_FILES:
                self._add_auxiliary_files([self.catalogue.root / path])
            elif name.endswith(".pt") and folder:
                number = self._file(path)
                ours = path.startswith(f"{OBJECTS}/")
                name = path.removeprefix(f"{OBJECTS}/").removesuffix(".pt")
                self.catalogue.objects[name] = StoredObject(
                    name=name,
                    kind="bytes" if ours else "object",
                    extent=(number, 0, self.catalogue.files[number].size),
                )

    def _scan(self, folder: str) -> Iterator[tuple[str, bool]]:
        """The names in a folder, and whether each is a folder."""
        place = self.catalogue.root / folder
        if is_remote(place):
            yield from ((name, (place / name).is_dir()) for name in list_names(place))
            return
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        check_inside(
                            self.catalogue.root, f"{folder}/{entry.name}" if folder else entry.name
                        )
                    yield entry.name, entry.is_dir()
        except OSError as e:
            raise StorageError(f"cannot list: {e.strerror or e}", file=place) from e

    def _prefetch_metadata(self, entries: Mapping[str, bool]) -> None:
        """Request the metadata of the arrays of a store, many at a time."""
        if not is_remote(self.catalogue.root):
            return
        Files().load_tree(self.catalogue.root)
        files = Files().tree(self.catalogue.root)[0] if any(entries.values()) else []
        Files().prefetch([(p, [(0, 0)]) for p in files if p.name in (V3_NAME, V2_NAME)])

    def _file(self, path: str) -> int:
        self.catalogue.files.append(StoredFile.stat(self.catalogue.root, path))
        return len(self.catalogue.files) - 1

    def _metadata(
        self, folder: str, entries: Mapping[str, bool]
    ) -> tuple[int, ArrayMetadata] | None:
        """The metadata of a folder's array and its file number; None if it is not an array."""
        name = next((n for n in (V3_NAME, V2_NAME) if n in entries), None)
        if name is None:
            return None
        path = f"{folder}/{name}" if folder else name
        number = self._file(path)
        full, size = self.catalogue.root / path, self.catalogue.files[number].size
        if size > _MAX_JSON_BYTES:
            raise FormatError(f"the metadata has {size:,} bytes, which is too much", file=full)
        data = parse_json(read_exact(full, 0, size), full)
        if name == V2_NAME:
            return number, read_v2(data, file=full, void_is_bfloat16=self.void_is_bfloat16)
        kind = data.get("node_type") if isinstance(data, dict) else None
        if kind == "group":
            return None
        if kind != "array":
            raise FormatError(f"node_type is {short_repr(kind)}", file=full)
        return number, read_v3(data, file=full)

    def _add_array(self, folder: str, metadata_file: int, metadata: ArrayMetadata) -> None:
        files: dict[str, int] = {}
        pending = [("", folder)]
        depth = len(metadata.shape) + 1
        while pending:
            key, path = pending.pop()
            for entry, is_folder in self._scan(path):
                if entry.startswith((".", "zarr.json")):
                    continue
                name = f"{key}/{entry}" if key else entry
                if is_folder:
                    if name.count("/") < depth:
                        pending.append((name, f"{path}/{entry}" if path else entry))
                elif entry[-1:].isdecimal() or entry == "c":
                    files[name] = self._file(f"{path}/{entry}" if path else entry)
        self.arrays.append(
            ZarrArray(
                name=folder or self.catalogue.root.name,
                folder=folder,
                metadata=metadata,
                metadata_file=metadata_file,
                files=files,
            )
        )

    def _add_auxiliary_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            name = path.relative_to(self.catalogue.root).as_posix()
            if is_regular_file(path) and can_copy(
                self.catalogue.root, name, self.catalogue.warnings
            ):
                self.catalogue.auxiliary_files[name] = path


def _add_common(catalogue: Catalogue) -> None:
    """Add Megatron's common state, like torch_dist, and the iteration."""
    root, out = catalogue.root, catalogue.metadata
    path = root / COMMON
    if path.is_file():
        check_inside(root, path.name)
        catalogue.files.append(StoredFile.stat(root, path.name))
        size = catalogue.files[-1].size
        if size > _MAX_COMMON_BYTES:
            raise FormatError(f"the common state has {size:,} bytes, which is too much", file=path)
        with opened(path) as fd:
            tree: Any = zip_reader.load_object(fd, 0, size, file=path)
        if not isinstance(tree, dict):
            raise FormatError(f"the common state is {short_repr(tree)}, not a dict", file=path)
        out["common"] = tree
        selected = {k: tree.get(k) for k in _METADATA_KEYS if k in tree}
        out.update(pickle_reader.to_plain(selected, file=path))
    if root.name == RELEASE:
        out.pop("iteration", None)
    elif "iteration" not in out and root.name.removeprefix("iter_").isdecimal():
        out["iteration"] = int(root.name.removeprefix("iter_"))
