"""Checks that a destination can and may be written, without writing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.errors import DestinationError
from megtool.staging.destination.store_check import (
    OVERWRITE_HINT,
    check_object,
    check_writable,
    has_objects,
)
from megtool.staging.nested_runs import check_runs_within
from megtool.storage.file_kinds import describe_kind, is_special
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, is_remote, resolve_links


def check_place(path: Path, *, files: Files | None = None) -> None:
    """Refuse a location where nothing can be written, whatever it is to be.

    This is asked before anything else is looked at. Of a store it takes one request.

    Raises:
        DestinationError: the store is only read, or it is the whole bucket; or what is above it
            is no folder, or cannot be written.
        StorageError: there is no such bucket, or the store refused.
    """
    if isinstance(path, StorePath):
        check_writable(path)
        has_objects(path)
        return
    system, real = files or Files(), Path(os.path.realpath(path))
    if system.stat(real) is None and real.name:
        _check_above(system, real)


def check_not_read(path: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse to replace a file that is one of `inputs`.

    Raises:
        DestinationError: it is.
    """
    if is_remote(path) or not path.is_file():
        return
    for other in inputs:
        try:
            is_same = not isinstance(other, StorePath) and os.path.samefile(path, other)
        except (OSError, ValueError):  # other options than paths
            continue
        if is_same:
            raise DestinationError(
                "this file is read, and would be replaced", file=path, hint="choose another file"
            )


def check_file(path: Path, *outputs: Path) -> None:
    """Refuse a file that cannot be written or replaced; folders of `outputs` may be missing.

    Raises:
        DestinationError: a folder, FIFO or device has its name, its folder is missing, or it cannot
            be written.
        StorageError: the store refused.
    """
    if isinstance(path, StorePath):
        check_object(path)
        return
    status = Files().stat(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise DestinationError(
            f"this is {describe_kind(status.st_mode)}, but a file is written here",
            file=path,
            hint="choose another file",
        )
    if not path.parent.is_dir():
        if resolve_links(path.parent) in {resolve_links(p) for p in outputs}:
            return
        raise DestinationError(
            f"the folder {str(path.parent)!r} does not exist",
            file=path,
            hint="create the folder first, or choose another file",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DestinationError(
            "the file cannot be written",
            file=path,
            hint="choose another file",
            error_id="destination-not-writable",
        )


def _check_above(files: Files, path: Path) -> None:
    """Refuse a path below a file, or below a folder that cannot be written."""
    above = next(p for p in path.parents if files.stat(p) is not None)
    status = files.stat(above)
    if status is None or not stat.S_ISDIR(status.st_mode):
        raise DestinationError(
            "a folder of the destination is a file",
            file=above,
            hint="choose a destination inside a folder",
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise DestinationError(
            "cannot be written to: read-only, or no permission",
            file=above,
            hint="choose another destination, or check the permissions",
            error_id="destination-not-writable",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationCheck:
    """A destination to check. `path` and `staging` contain no symbolic links.

    `is_file`: the output is a single file, not a folder. `overwrite`: existing data may be
    replaced.
    """

    files: Files
    path: Path
    staging: Path
    is_file: bool
    overwrite: bool
    sources: Sequence[Path]

    def check_surroundings(self) -> None:
        """Refuse a destination that overlaps a source or is not writable.

        Raises:
            DestinationError: it overlaps a source, has no name, or cannot be written.
        """
        path = self.path
        if not path.name:
            raise DestinationError(
                f"{str(path)!r} cannot be a destination", file=path, hint="name a new folder"
            )
        for source in self.sources:
            real = source if is_remote(source) else Path(os.path.realpath(source))
            if self._inside(path, real) or self._inside(real, path):
                raise DestinationError(
                    f"the destination and the source {str(source)!r} are the same, "
                    "or one is inside the other",
                    file=path,
                    hint="choose a destination outside the source",
                    error_id="destination-in-source",
                )
            if self._inside(real, self.staging):
                raise DestinationError(
                    f"the source {str(source)!r} is inside the staging folder of the destination",
                    file=self.staging,
                    hint="choose another destination",
                    error_id="destination-in-source",
                )
        _check_above(self.files, path)
        mode = self._mode(self.staging, True)
        if mode and not stat.S_ISDIR(mode):
            raise DestinationError(
                f"{describe_kind(mode)} is in the way of the staging folder",
                file=self.staging,
                hint="move it away, or choose another destination",
            )

    def check_free(self, *, completed: bool = False) -> None:
        """Refuse to replace existing data; `completed`: an earlier run of this command wrote it.

        Raises:
            DestinationError: it exists, is of the wrong kind, or cannot be replaced.
        """
        path = self.path
        status = self.files.stat(path)
        if status is None:
            return
        if is_special(status.st_mode):
            raise DestinationError(
                f"the destination is {describe_kind(status.st_mode)}, which is never replaced",
                file=path,
                hint="choose another destination",
            )
        if stat.S_ISDIR(status.st_mode) == self.is_file:
            kinds = ("a folder", "a file") if self.is_file else ("a file", "a folder")
            inside = f"name a file inside it: {path / 'model.safetensors'}"
            raise DestinationError(
                f"is {kinds[0]}, and the output is {kinds[1]}",
                file=path,
                hint=inside if self.is_file else "name a new folder, or move the file away",
            )
        if not self.is_file and not self.files.names(path):
            self._check_replaceable(status)
            return
        if not self.overwrite:
            hint = OVERWRITE_HINT
            if completed:
                hint = f"an earlier run of the same command has completed it; {hint}"
            raise DestinationError(
                "the destination already exists",
                file=path,
                hint=hint,
                error_id="destination-exists",
            )
        self._check_replaceable(status)
        if not self.is_file:
            check_runs_within(self.files, path)

    def _check_replaceable(self, status: os.stat_result) -> None:
        path = self.path
        parent = self.files.stat(path.parent)
        if parent is None or parent.st_dev != status.st_dev:
            raise DestinationError(
                "is a mount point, which cannot be replaced",
                file=path,
                hint="name a folder inside it",
            )
        if self._is_current(path):
            raise DestinationError(
                "cannot replace the current folder",
                file=path,
                hint="name a new folder, or run from elsewhere",
            )

    def _is_current(self, path: Path) -> bool:
        """Whether the process runs in a folder, or below it; its own folder may be gone."""
        try:
            return Path.cwd().is_relative_to(path)
        except FileNotFoundError:
            return False

    def _inside(self, path: Path, folder: Path) -> bool:
        """Whether `path` is `folder` or inside it, links and mounts included."""
        if path.is_relative_to(folder):
            return True
        if is_remote(path) or is_remote(folder):
            return False  # stores have no links and no mounts
        folder_status = self.files.stat(folder)
        return folder_status is not None and any(
            (status := self.files.stat(p)) is not None and os.path.samestat(status, folder_status)
            for p in (path, *path.parents)
        )

    def _mode(self, path: Path, link: bool = False) -> int:
        status = self.files.lstat(path) if link else self.files.stat(path)
        return 0 if status is None else status.st_mode
