"""An iteration that several processes write into an object store.

Every rank uploads its file, which appears when it is marked as done. Rank 0 then puts the small
files, those that make the iteration complete last, and the tracker after all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import SIDECAR, TOOL, Sidecar, encode_sidecar, parse_sidecar
from megtool.errors import StorageError
from megtool.formats.save_folder import TRACKER
from megtool.staging.publication import (
    list_keys,
    publishing_order,
    remove_objects,
)
from megtool.staging.store.object_upload import ObjectUpload, upload_object, write_file
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.objects.small_object import read_object
from megtool.train.checkpointing.staged_iteration import STAGING, StagedIteration

_OPEN = "open"
"""The mark of rank 0 that objects may appear: what was there before is no checkpoint any more."""


class StoreIteration(StagedIteration):
    """See `StagedIteration`. Marks are objects; the files of a rank appear when it is done."""

    def __init__(
        self,
        files: Files,
        folder: StorePath,
        iteration: int,
        *,
        number: int,
        rank: int,
        size: int,
        fsync: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(
            files,
            folder,
            iteration,
            number=number,
            rank=rank,
            size=size,
            fsync=fsync,
            timeout_s=timeout_s,
        )
        self.tree = self.final
        self._store = folder.store
        self._prefix = folder / STAGING / self.staging.name
        self._target = folder / self.final.name
        self._uploads: list[ObjectUpload] = []
        self._buffers = PartBuffers()

    # ---- every rank

    def begin(self) -> None:
        """As rank 0, make an iteration of this number that is there already incomplete."""
        if self._rank:
            return
        stale = [key for key in list_keys(self._target) if key.rpartition("/")[2] == ".metadata"]
        self._store.delete(stale)
        remove_objects(self._target)
        self._store.put((self._prefix / _OPEN).key, b"")

    def _create(self, name: str, size: int) -> Path:
        path = self._target / name
        self._uploads.append(ObjectUpload(path, size, self._buffers))
        return path

    def mark_done(self) -> None:
        """Let this rank's files appear; the mark holds their digests."""
        for upload in self._uploads:
            upload.finish()
        self._wait_until(lambda: _OPEN in self._marks(), "rank 0 has begun")
        for upload in self._uploads:
            upload.close()
        self._buffers.close()
        self._store.put(self._mark_key("done"), encode_sidecar(self._own_sidecar()))

    def mark_failed(self) -> None:
        """Mark this rank as failed, and drop what it has uploaded."""
        for upload in self._uploads:
            upload.abort()
        self._buffers.close()
        self._store.put(self._mark_key("failed"), b"")

    def _mark_key(self, state: str) -> str:
        return (self._prefix / f"rank_{self._rank}.{state}").key

    def _marks(self) -> set[str]:
        infos = self._store.list(self._prefix.key).objects
        return {info.key.rpartition("/")[2] for info in infos}

    def _is_over(self) -> bool:
        return not self._marks()

    # ---- rank 0

    def require_space(self, num_bytes: int) -> None:
        """A store says nothing about space."""

    def commit(
        self, small: Mapping[str, bytes | Path], *, rotation: Mapping[str, Any] | None = None
    ) -> None:
        """When all ranks are done, put the small files, and the tracker.

        Raises:
            StorageError: a rank failed, or the store refused; earlier iterations stay.
        """
        self._wait_for_ranks()
        for name, data in small.items():
            if isinstance(data, Path):
                self._upload(data, self._target / name)
        contents = {name: data for name, data in small.items() if isinstance(data, bytes)}
        for name, data in contents.items():
            path = self._target / name
            self._digests.register(path, len(data))
            self._digests.record(path, 0, (data,))
        contents[SIDECAR] = encode_sidecar(replace(self._whole_sidecar(), rotation=rotation))
        for name in publishing_order(contents, [".metadata"]):
            self._store.put((self._target / name).key, contents[name])
        self.files.refresh(self.folder)
        self.files.replace_file(self.folder / TRACKER, str(self.iteration).encode(), "")
        for value in small.values():
            if isinstance(value, Path):
                self.files.remove(value)
        remove_objects(self._prefix)

    def _upload(self, source: Path, path: StorePath) -> None:
        """Upload a local file, of any size."""
        num_bytes = source.stat().st_size
        self._digests.register(path, num_bytes)
        self.files.recorder = self._digests
        try:
            upload_object(
                path, num_bytes, lambda fd: write_file(source, fd, self.files), self.files
            )
        finally:
            self.files.recorder = None

    def _whole_sidecar(self) -> Sidecar:
        sidecar = self._own_sidecar()
        files, stored = dict(sidecar.files), dict(sidecar.stored_tensors)
        for rank in range(self._size):
            if rank != self._rank:
                mark = self._prefix / f"rank_{rank}.done"
                data = read_object(mark)
                if data is None:
                    raise StorageError("the mark of a rank is gone", file=mark)
                other = parse_sidecar(data, mark)
                files |= other.files
                stored |= other.stored_tensors
        whole = Sidecar(names="stored", tool=TOOL, tensors={}, files=files)
        return replace(whole, stored_tensors=stored)

    def discard(self) -> None:
        """Remove what has appeared, once no rank writes."""
        try:
            self._wait_until(
                lambda: not self._ranks_in_state("busy", but_for=0), "all ranks have stopped"
            )
        finally:
            remove_objects(self._target)
            remove_objects(self._prefix)
            self.files.refresh(self.folder)


def remove_unfinished_objects(folder: StorePath) -> list[str]:
    """Remove what unfinished saves left in a save folder; returns the names of their iterations.

    Only the run that holds the folder's lease may call it.

    Raises:
        StorageError: the store refused.
    """
    store, staging = folder.store, folder / STAGING
    names = [key.removeprefix(f"{staging.key}/").partition("/")[0] for key in list_keys(staging)]
    unfinished = sorted({name for name in names if name != "lock" and "." in name})
    for upload in store.list_uploads(folder.key):
        store.abort_upload(upload.key, upload.upload_id)
    for name in unfinished:
        iteration = folder / name.rpartition(".")[0]
        if store.head((iteration / ".metadata").key) is None:
            remove_objects(iteration)
        remove_objects(staging / name)
    Files().refresh(folder)
    return unfinished
