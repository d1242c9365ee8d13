"""Where workers of a scan leave their records: a folder that all see, or a prefix of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megtool.errors import DestinationError, StorageError
from megtool.staging.manifest import list_run_files, worker_file
from megtool.staging.record import MAX_RECORD_BYTES
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.lock import LockFile
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.small_object import read_object

_HINT = "--worker-dir names a folder, or a prefix of a store, that all workers see and may write to"


class HeldLock(Protocol):
    """A lock that this process holds."""

    def release(self) -> None:
        """Release it."""


class RecordFolder(Protocol):
    """The records of one scan by their names, and the locks of its workers.

    Every method raises `StorageError` if it cannot be read or written.
    """

    def lock(self, name: str, *, create: bool = False) -> HeldLock:
        """Hold a lock; `create`: make the folder.

        Raises:
            DestinationError: another process holds it, or nothing can be written here.
        """

    def names(self) -> list[str]:
        """What there is."""

    def has(self, name: str) -> bool:
        """Whether there is a record."""

    def read(self, name: str) -> bytes | None:
        """A record; None if it is gone."""

    def write(self, index: int, data: bytes) -> None:
        """Write the record of a worker, whole or not at all."""

    def remove(self) -> None:
        """Remove all records, and the folder."""


def open_records(path: Path, files: Files) -> RecordFolder:
    """The records at a path, which may not exist yet."""
    return _StoreRecords(path) if isinstance(path, StorePath) else _LocalRecords(path, files)


class _LocalRecords:
    """In a folder of a file system."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files

    def lock(self, name: str, *, create: bool = False) -> HeldLock:
        make_folder = self._make if create else lambda: None
        return LockFile(self._files, self._path / name, make_folder)

    def _make(self) -> None:
        try:
            self._files.make_own_folder(self._path, is_private=True)
        except StorageError as e:
            raise _not_writable(self._path, e) from e

    def names(self) -> list[str]:
        return self._files.names(self._path) if self._files.lstat(self._path) else []

    def has(self, name: str) -> bool:
        return self._files.lstat(self._path / name) is not None

    def read(self, name: str) -> bytes | None:
        return self._files.read_whole(self._path / name, at_most=MAX_RECORD_BYTES, is_own=True)

    def write(self, index: int, data: bytes) -> None:
        path, temporary = self._path / worker_file(index, "record"), worker_file(index, "new")
        self._files.replace_file(path, data, temporary, fsync=True)

    def remove(self) -> None:
        for name in list_run_files(self.names()):
            self._files.remove(self._path / name)
        self._files.remove_empty(self._path)


class _StoreRecords:
    """Objects below a prefix."""

    def __init__(self, path: StorePath) -> None:
        self._path, self._store = path, path.store

    def lock(self, name: str, *, create: bool = False) -> HeldLock:
        try:
            if not self._store.can_write:
                raise StorageError("this kind of store is only read", file=self._path)
            return Lease(self._path / name)
        except StorageError as e:
            raise _not_writable(self._path, e) from e

    def names(self) -> list[str]:
        return [info.key.rpartition("/")[2] for info in self._store.list(self._path.key).objects]

    def has(self, name: str) -> bool:
        return self._store.head((self._path / name).key) is not None

    def read(self, name: str) -> bytes | None:
        return read_object(self._path / name)

    def write(self, index: int, data: bytes) -> None:
        self._store.put((self._path / worker_file(index, "record")).key, data)

    def remove(self) -> None:
        names = [n for n in list_run_files(self.names()) if not n.endswith(".lock")]
        self._store.delete([(self._path / name).key for name in names])


def _not_writable(path: Path, e: StorageError) -> DestinationError:
    return DestinationError(
        f"no folder for the records of workers: {e.message}",
        file=path,
        hint=_HINT,
        error_id="destination-not-writable",
    )
