"""Copies on this machine of what only a library that opens paths, or a memory map, can read."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import mmap
import os
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.errors import StorageError
from megtool.storage.files import Files, opened
from megtool.storage.location.path import is_remote
from megtool.storage.objects.transfer import to_storage_error

MAX_COPY_BYTES = 64 << 30
"""The most that is copied of one location."""

_STEP_BYTES = 16 << 20
_HINT = "TMPDIR names another folder for temporary files; or copy the data to a disk first"


@contextlib.contextmanager
def local_copy(path: Path, *, head_bytes: int | None = None) -> Iterator[Path]:
    """A path on this machine for a file or a folder: its own, or a copy of what is in a store.

    A copy exists for the body of the `with`. Of a file only the first `head_bytes` are copied, if
    given, and the rest reads as zeros.

    Raises:
        StorageError: it is missing or too large, or there is no room for it.
    """
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="megtool-") as folder:
        copy = Path(folder) / path.name
        if path.is_dir():
            files = Files()
            files.load_tree(path)
            members = files.tree(path)[0]
            _check_size(path, sum(file.stat().st_size for file in members))
            for file in members:
                _copy_file(file, copy / file.relative_to(path).as_posix())
        else:
            _copy_file(path, copy, head_bytes)
        yield copy


def local_work_folder(destination: Path, purpose: str, local: Path) -> Path:
    """Return the folder for what a run keeps on this machine: `local`, unless it is in a store.

    That for a destination in a store is a folder of this user among temporary files.
    """
    if not is_remote(destination):
        return local
    name = hashlib.sha256(str(destination).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"megtool-{purpose}-{os.geteuid()}-{name}"


@functools.cache
def kept_copy(path: Path, state: Hashable) -> Path:
    """Like `local_copy`, of a folder, until the process ends: for what is read all the time.

    One copy is made for each `state` of the folder.
    """
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(local_copy(path))


def map_file(path: Path, *, offset: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
    """The bytes of a file, or a range of it, mapped into memory: private and writable.

    What is in a store is copied to an unnamed temporary file, which disappears with the array.

    Raises:
        FormatError: the file is shorter.
        OSError, StorageError: it cannot be read, or there is no room for a copy.
    """
    if num_bytes is None:
        num_bytes = path.stat().st_size - offset
    if not num_bytes:
        return np.empty(0, np.uint8)
    if not is_remote(path):
        return np.memmap(path, np.uint8, "c", offset, (num_bytes,))
    _check_size(path, num_bytes)
    try:
        with tempfile.TemporaryFile(prefix="megtool-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes)
    except OSError as e:
        raise _no_room(e, path) from e
    data = np.frombuffer(mapped, np.uint8)
    files = Files()
    with opened(path) as fd:
        for start in range(0, num_bytes, _STEP_BYTES):
            files.pread_into(fd, data[start : start + _STEP_BYTES], offset + start)
    return data


def _copy_file(path: Path, copy: Path, head_bytes: int | None = None) -> None:
    files = Files()
    with opened(path) as fd:
        size = files.fstat(fd).st_size
        end = size if head_bytes is None else min(size, head_bytes)
        _check_size(path, end)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("wb") as target:
                for start in range(0, end, _STEP_BYTES):
                    part = bytearray(min(_STEP_BYTES, end - start))
                    files.pread_into(fd, memoryview(part), start)
                    target.write(part)
                target.truncate(size)
        except OSError as e:
            raise _no_room(e, path) from e


def _check_size(path: Path, num_bytes: int) -> None:
    if num_bytes > MAX_COPY_BYTES:
        raise StorageError(
            f"{num_bytes:,} bytes are too many to copy to this machine", file=path, hint=_HINT
        )


def _no_room(error: OSError, path: Path) -> StorageError:
    reason = to_storage_error(error, path, "be copied to a temporary file")
    return StorageError(reason.message, file=path, hint=_HINT)
