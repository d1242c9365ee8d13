"""System calls on names in open folders, and renames that Python's library lacks."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Flags of renameat2(2)."""

_AT_FDCWD = -100


def is_folder_at(name: str, folder_fd: int) -> bool | None:
    """Whether a name in an open folder is a folder, and no link to one; None if it is gone."""
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=folder_fd).st_mode)
    except FileNotFoundError:
        return None


def unlink_at(name: str, folder_fd: int) -> None:
    """Remove a file from an open folder."""
    os.unlink(name, dir_fd=folder_fd)


def rmdir_at(name: str, folder_fd: int) -> None:
    """Remove an empty folder from an open folder."""
    os.rmdir(name, dir_fd=folder_fd)


def open_folder_at(name: str, folder_fd: int) -> int:
    """Open a folder in an open folder; a link is an error."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder_fd)


def renameat2(source: Path, target: Path, flags: int) -> None:
    """Call renameat2(2), which Python's library lacks.

    Raises:
        OSError: it failed; ENOSYS if the system lacks it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    names = os.fsencode(source), os.fsencode(target)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
