"""Writes the .bin and .idx files of a data set, staged and renamed together, index last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from stat import S_ISDIR
from types import TracebackType
from typing import Self

from megtool.errors import DestinationError, MegtoolError
from megtool.staging.nested_runs import check_runs_above
from megtool.storage.file_kinds import describe_kind, is_special
from megtool.storage.files import Files
from megtool.storage.lock import LockFile

DATA, INDEX = ".bin", ".idx"


def dataset_prefix(path: Path) -> Path:
    """The name of a data set, which may be given as that of one of its two files."""
    return path.with_suffix("") if path.suffix in (DATA, INDEX) else path


def add_suffix(prefix: Path, suffix: str) -> Path:
    """A file of a data set; a prefix may hold dots, which `with_suffix` would cut."""
    return prefix.with_name(prefix.name + suffix)


class DatasetFiles:
    """`prefix`.bin and `prefix`.idx while they are written, as a context.

    Both are written under `staged`, in a hidden folder beside them, which `commit` empties by two
    renames. A data set without an index is none, so the old index goes first and the new one comes
    last: at no time does an index lie beside the data of another run. Whatever happens before
    `commit` leaves what was there untouched; what a killed run left is removed by the next one.
    """

    def __init__(self, prefix: Path, files: Files, *, overwrite: bool = False) -> None:
        """`prefix` may also be given as the name of one of the two files."""
        self.prefix = dataset_prefix(prefix)
        self._files = files
        self._overwrite = overwrite
        self._folder = self.prefix.with_name(f".{self.prefix.name}.bin.megtool")
        self.staged = self._folder / self.prefix.name
        self._created_folders: list[Path] = []

    def check(self) -> None:
        """Refuse a destination that exists.

        Raises:
            DestinationError: one of the files exists and may not be overwritten, or is no file.
        """
        if not self.prefix.name:
            raise DestinationError(f"{str(self.prefix)!r} is not a file name")
        for suffix in (DATA, INDEX):
            path = self._path(suffix)
            status = self._files.stat(path)
            if status is not None and (S_ISDIR(status.st_mode) or is_special(status.st_mode)):
                raise DestinationError(
                    f"the destination is {describe_kind(status.st_mode)}, which is never replaced",
                    file=path,
                    hint="name another destination",
                )
            if not self._overwrite and self._files.lstat(path) is not None:
                raise DestinationError(
                    "already exists",
                    file=path,
                    hint="name another destination, or replace it: --overwrite",
                    error_id="destination-exists",
                )

    def commit(self, *, fsync: bool = True) -> int:
        """Rename both files to their final names; returns their bytes.

        Raises:
            DestinationError: something appeared there meanwhile.
            StorageError: the system refused.
        """
        self.check()
        staged = {suffix: self._path(suffix, self.staged) for suffix in (DATA, INDEX)}
        num_bytes = sum(path.stat().st_size for path in staged.values())
        if fsync:
            for path in staged.values():
                self._files.fsync(path)
        self._files.remove(self._path(INDEX))
        if fsync:
            self._files.fsync_dir(self.prefix.parent)
        for suffix, path in staged.items():
            self._files.rename(path, self._path(suffix), replace=self._overwrite)
        if fsync:
            self._files.fsync_dir(self.prefix.parent)
        self._created_folders = []
        return num_bytes

    def __enter__(self) -> Self:
        self.check()
        self._lock = LockFile(self._files, self._folder / "lock", self._make_folder)
        try:
            check_runs_above(self._files, Path(os.path.realpath(self.prefix)))
            for suffix in (DATA, INDEX):
                self._files.remove(self._path(suffix, self.staged))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        """Remove what is staged, and release the lock."""
        with contextlib.suppress(MegtoolError):  # the files are there, or the first error counts
            for path in (*(self._path(s, self.staged) for s in (DATA, INDEX)), self._lock_file()):
                self._files.remove(path)
            self._files.remove_empty(self._folder)
            for folder in reversed(self._created_folders):
                self._files.remove_empty(folder)
        self._lock.release()

    def _make_folder(self) -> None:
        for folder in reversed([p for p in self._folder.parents if self._files.stat(p) is None]):
            if self._files.mkdir(folder):
                self._created_folders.append(folder)
        self._files.make_own_folder(self._folder, is_private=True)

    def _lock_file(self) -> Path:
        return self._folder / "lock"

    def _path(self, suffix: str, prefix: Path | None = None) -> Path:
        return add_suffix(prefix or self.prefix, suffix)
