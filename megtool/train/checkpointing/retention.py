"""The iterations in a save folder: which there are, which is the newest, which to remove."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from stat import S_ISREG

from megtool.formats.save_folder import TRACKER, folder_name
from megtool.staging.publication import remove_objects
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, is_remote

_MAX_TRACKER_BYTES = 1000
_ITERATION = re.compile(r"iter_(\d{7,})")


def read_tracker(folder: Path) -> int | None:
    """The iteration that a save folder's tracker names, which may be missing; None without one.

    Raises:
        FormatError: the tracker is no regular file, or too long.
        StorageError: it cannot be read.
    """
    data = Files().read_whole(folder / TRACKER, at_most=_MAX_TRACKER_BYTES) or b""
    text = data.decode(errors="replace").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def has_iteration(folder: Path, iteration: int) -> bool:
    """Whether a save folder has a complete iteration of this number."""
    status = Files().stat(folder / folder_name(iteration) / ".metadata")  # it is written last
    return status is not None and S_ISREG(status.st_mode)


def find_newest_iteration(folder: Path) -> int | None:
    """The iteration that a save folder's tracker names if it is complete, else the newest that is.

    None if there is none.
    """
    Files().refresh(folder)
    named = read_tracker(folder)
    if named is not None and has_iteration(folder, named):
        return named
    return max((n for n in list_iterations(folder) if has_iteration(folder, n)), default=None)


def list_iterations(folder: Path) -> list[int]:
    """The numbers of all iterations in a save folder, complete or not, ascending."""
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def list_interrupted(folder: Path) -> list[int]:
    """The numbers of iterations of which an interrupted save has left a part in a store.

    On a disk there are none: an iteration appears complete.
    """
    staging = folder / ".megtool"
    if not is_remote(folder) or not staging.is_dir():
        return []
    names = [name.rpartition(".")[0] for name in Files().names(staging)]
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def prune_checkpoints(folder: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` complete iterations; returns the removed ones.

    The iteration that the tracker names, and newer ones, stay.
    """
    newest = find_newest_iteration(folder)
    if newest is None:
        return []
    old = [n for n in list_iterations(folder) if n <= newest][:-keep]
    for number in old:
        if isinstance(folder, StorePath):
            remove_objects(folder / folder_name(number))
        else:
            shutil.rmtree(folder / folder_name(number), ignore_errors=True)
    Files().refresh(folder)
    return old
