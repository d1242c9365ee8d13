"""What a path may name: a regular file, a folder, or a file that only megtool itself has made.

Links, FIFOs, sockets and devices can be planted under a name that a run is going to use. Opening
one may block for ever, change a device, or write to a file of somebody else.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megtool.errors import DestinationError, FormatError

_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_HINT = "another program put it there: remove it, or choose another destination"


def describe_kind(mode: int) -> str:
    """The kind of a file with an article: `a FIFO`."""
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "a file of an unknown kind")


def is_special(mode: int) -> bool:
    """Whether it is a FIFO, a socket or a device: nothing that has contents of its own."""
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def check_readable_kind(path: Path, status: os.stat_result) -> None:
    """Refuse to read from anything except a regular file or a folder.

    Raises:
        FormatError: it is a FIFO, a socket or a device.
    """
    if is_special(status.st_mode):
        raise FormatError(
            f"{describe_kind(status.st_mode)} is in the place of a file",
            file=path,
            hint="put the file itself there: a checkpoint contains regular files only",
        )


def check_own_file(path: Path, status: os.stat_result, *, is_owner: bool) -> None:
    """Refuse to use a file of a run that the run cannot have made; `is_owner`: this user owns it.

    Raises:
        DestinationError: it is a link, a folder, a FIFO, a socket or a device, has a second name,
            or belongs to another user.
    """
    if not stat.S_ISREG(status.st_mode):
        raise DestinationError(
            f"{describe_kind(status.st_mode)} is in the place of a file that megtool writes",
            file=path,
            hint=_HINT,
        )
    if status.st_nlink > 1:
        raise DestinationError(
            f"the file has {status.st_nlink} names (hard links), so writing it would change "
            "another file",
            file=path,
            hint=_HINT,
        )
    _check_owner(path, status, is_owner)


def check_own_folder(
    path: Path, status: os.stat_result, *, is_owner: bool, is_open_to_others: bool = False
) -> None:
    """Refuse a folder of a run that the run cannot have made.

    `is_open_to_others`: other users may write in it, and must not.

    Raises:
        DestinationError: it is no folder, or belongs to another user, or others may write in it.
    """
    if not stat.S_ISDIR(status.st_mode):
        raise DestinationError(
            f"{describe_kind(status.st_mode)} is in the way of the staging folder",
            file=path,
            hint="move it away, or choose another destination",
        )
    _check_owner(path, status, is_owner)
    if is_open_to_others:
        raise DestinationError(
            f"other users may write in this staging folder (mode {status.st_mode & 0o777:o})",
            file=path,
            hint="remove it: then this run starts anew, in a folder that is closed to others",
        )


def _check_owner(path: Path, status: os.stat_result, is_owner: bool) -> None:
    if not is_owner:
        raise DestinationError(
            f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}",
            file=path,
            hint="run as that user, remove it, or choose another destination",
        )
