"""The state of all files of a checkpoint in one text, to tell whether they have changed."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from megtool.storage.files import Files
from megtool.storage.location.path import is_remote


def describe_state(files: Files, path: Path) -> str:
    """Return a hash of the names, sizes and times of all files of a checkpoint.

    In stores, it is one of versions.
    """
    h = hashlib.sha256()
    status = files.stat(path)
    is_folder = status is not None and stat.S_ISDIR(status.st_mode)
    for file in sorted(files.tree(path)[0]) if is_folder else [path]:
        status = files.stat(file)
        name = str(file.relative_to(path))
        version = status.st_ino if status and is_remote(file) else 0
        h.update(repr((name, status and (status.st_size, status.st_mtime_ns), version)).encode())
    return h.hexdigest()[:32]
