"""Runs with nested destinations: a folder that is replaced as a whole, and one inside it.

A run first locks its own staging folder, and then looks for the locks of others, so of two runs at
least one sees the other. It looks for

- locks in the staging folders of all folders above its destination: such a run will replace the
  destination, whatever is in it;
- staging folders inside the folder that it replaces itself. A lock there is a run that writes
  there now. Without a lock it is an interrupted run, whose finished work would be lost.

The second look, right before the rename, is for file systems without locks and for folders that are
mounted at several places. Other runs hold a lock for a moment before they are refused, so what is
seen then counts only if it stays.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megtool.errors import DestinationError, StorageError
from megtool.staging.manifest import MANIFEST, SCAN_PREFIX, find_worker_files
from megtool.storage.file_kinds import describe_kind, is_special
from megtool.storage.files import Files
from megtool.storage.lock import find_holder

LOCK = "lock"
SAVE_STAGING = ".megtool"
"""The staging folder inside a save folder of `finetune`."""

_STAGING = re.compile(r"\.(.*)\.megtool", re.DOTALL)
_WORK = ("tree", "journal", "old", MANIFEST)  # what a run leaves that is worth something
_PAUSE_S = 0.05


def staging_folder(destination: Path) -> Path:
    """The staging folder of a destination."""
    return destination.parent / f".{destination.name}.megtool"


def check_runs_above(files: Files, destination: Path) -> None:
    """Refuse a destination inside one that another run writes, or inside a staging folder.

    Raises:
        DestinationError: a run is about to replace a folder above.
        StorageError: a system call failed.
    """
    for folder in destination.parents:
        if not folder.name:
            continue
        if _STAGING.fullmatch(folder.name):
            raise DestinationError(
                "the destination is inside a staging folder, which is removed when its run ends",
                file=folder,
                hint="choose another destination",
            )
        staging = staging_folder(folder)
        status = files.lstat(staging)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        if not _may_replace(files, folder, status.st_uid):
            continue
        try:
            holder = find_run(files, staging)
        except StorageError as e:
            if isinstance(e.__cause__, PermissionError):  # of another user, who may be gone
                continue
            raise
        if holder is not None:
            raise DestinationError(
                f"{holder} is writing {str(folder)!r}, which the destination is inside",
                file=destination,
                hint="wait until it has ended, or choose another destination",
                error_id="destination-locked",
            )


def find_run(files: Files, staging: Path) -> str | None:
    """The process that writes in a staging folder: a run of its own, or a worker of one.

    Raises:
        StorageError: a file cannot be read.
    """
    holder = find_holder(files, staging / LOCK)
    is_shared = staging.name.startswith(SCAN_PREFIX) or files.lstat(staging / MANIFEST) is not None
    if holder is None and is_shared:
        for _, name in find_worker_files(files.names(staging), "lock"):
            if holder := find_holder(files, staging / name):
                break
    return holder


def _may_replace(files: Files, folder: Path, user: int) -> bool:
    """Whether a user may rename a folder: in a sticky one such as /tmp, only owners may."""
    parent, status = files.stat(folder.parent), files.stat(folder)
    if parent is None or status is None or not parent.st_mode & stat.S_ISVTX:
        return True
    return user in (0, os.geteuid(), parent.st_uid, status.st_uid)


def check_runs_within(files: Files, folder: Path) -> None:
    """Refuse to replace a folder in which another run writes, or which is no checkpoint.

    Raises:
        DestinationError: a run writes in it, or has left finished work there; or it contains a
            FIFO, a socket or a device.
        StorageError: it cannot be read as a whole.
    """
    for path in _walk(files, folder):
        try:
            holder = find_run(files, path)
        except StorageError as e:
            if not isinstance(e.__cause__, PermissionError):
                raise
            holder = "perhaps a process of another user"
        target = path.parent / _target_name(path)
        if holder is not None:
            raise DestinationError(
                f"{holder} is writing {str(target)!r}, which is inside the destination",
                file=folder,
                hint="wait until it has ended, or choose another destination",
                error_id="destination-locked",
            )
        if path.name != SAVE_STAGING and any(files.lstat(path / name) for name in _WORK):
            raise DestinationError(
                f"an interrupted run has left its work for {str(target)!r} in {str(path)!r}, "
                "inside the destination",
                file=folder,
                hint="run its command again to finish it, or remove that folder",
                error_id="interrupted-run",
            )


def _target_name(staging: Path) -> str:
    match = _STAGING.fullmatch(staging.name)
    return match[1] if match else ""


def _walk(files: Files, folder: Path) -> Iterator[Path]:
    """The staging folders inside a folder, at any depth.

    Raises:
        DestinationError: it contains a FIFO, a socket or a device.
        StorageError: a system call failed.
    """
    folders = [folder]
    for inner in folders:  # the list grows during the loop
        for name, is_folder in files.call(inner, "list", _scan, inner):
            path = inner / name
            if not is_folder:
                _check_replaceable(files, path)
            elif name == SAVE_STAGING or _STAGING.fullmatch(name):
                yield path
            else:
                folders.append(path)


def _scan(folder: Path) -> list[tuple[str, bool]]:
    """Folders in a folder, and names that are neither a folder nor a file nor a link."""
    with os.scandir(folder) as entries:
        return [
            (entry.name, is_folder)
            for entry in entries
            if (is_folder := entry.is_dir(follow_symlinks=False))
            or not (entry.is_file(follow_symlinks=False) or entry.is_symlink())
        ]


def _check_replaceable(files: Files, path: Path) -> None:
    status = files.lstat(path)
    if status is not None and is_special(status.st_mode):
        raise DestinationError(
            f"the destination contains {describe_kind(status.st_mode)}, which --overwrite does "
            "not remove",
            file=path,
            hint="remove it if the folder is the right one, or choose another destination",
        )


def wait_for(check: Callable[[], None], seconds: float) -> None:
    """Call `check` until it passes; after `seconds` its error is raised.

    Raises:
        DestinationError: of `check`.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            check()
        except DestinationError:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_S)
        else:
            return
