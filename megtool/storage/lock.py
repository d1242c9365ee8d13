"""A lock file that lets one run at a time write a destination."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

from megtool.errors import DestinationError, StorageError
from megtool.storage.files import Files


class LockFile:
    """Holds the lock file at `path`, which names process and host, until `release`.

    A `shared` lock excludes only those that are not, and names nobody. The system releases the lock
    when the process ends, so a leftover file locks nobody out. If the file system has no locks,
    `is_certain` is false: then only processes of this host are detected.
    """

    is_certain = True

    def __init__(
        self, files: Files, path: Path, make_folder: Callable[[], None], *, shared: bool = False
    ) -> None:
        """`make_folder` creates the folder of `path`; another run may remove it at any time.

        Raises:
            DestinationError: another run holds the lock, or the folder cannot be written.
        """
        self._files = files
        self._path, self._shared = path, shared
        for _ in range(100):
            try:
                make_folder()
                self._fd = files.open_write(path)
            except StorageError as e:
                cause = e.__cause__
                if isinstance(cause, FileNotFoundError):
                    continue  # another run removed the folder just now
                if isinstance(cause, OSError) and cause.errno in _READ_ONLY:
                    raise DestinationError(
                        e.message, file=e.file, hint=e.hint, error_id="destination-not-writable"
                    ) from e
                raise
            try:
                if self._take():
                    return
            except BaseException:
                self.release()
                raise
            self.release()
        raise DestinationError(
            "cannot create a staging folder here",
            file=path.parent,
            hint="other runs use this destination, or nothing can be written here",
            error_id="destination-not-writable",
        )

    def _take(self) -> bool:
        """Lock the open file; False if another run removed it."""
        locked = self._try()
        for _ in range(_ATTEMPTS):
            if locked is not False:
                break
            time.sleep(_PAUSE_S)  # `find_holder` of another run holds it for a moment
            locked = self._try()
        if locked is not True:
            if locked is False or not self._shared:
                self._check_holder(busy=locked is False)
            self.is_certain = False
        if not self.is_in_place():
            return False
        if self._shared:
            return True
        try:
            self._files.truncate(self._fd, 0)
            self._files.pwrite_all(self._fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        except StorageError:
            self._files.remove(self._path)
            raise
        return True

    def _try(self) -> bool | None:
        if self._shared:
            return self._files.lock(self._fd, shared=True)
        return self._files.lock(self._fd)

    def is_in_place(self) -> bool:
        """Whether the path of the lock still names the locked file."""
        status = self._files.lstat(self._path)
        return status is not None and os.path.samestat(status, self._files.fstat(self._fd))

    def _check_holder(self, *, busy: bool) -> None:
        holder = _read_holder(self._files, self._path, busy=busy)
        if holder is not None:
            raise DestinationError(
                f"{holder} is writing this destination",
                file=self._path.parent,
                hint="wait until it has ended, or choose another destination",
                error_id="destination-locked",
            )

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)


def find_holder(files: Files, path: Path) -> str | None:
    """The process that holds the lock file at `path`; None if nobody does, or it is no lock.

    Raises:
        StorageError: the file cannot be read.
    """
    status = files.lstat(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    try:
        fd = files.open_read(path)
    except StorageError as e:
        if isinstance(e.__cause__, FileNotFoundError):
            return None
        raise
    try:
        locked = files.lock(fd, shared=True)  # until it is closed, a few lines below
        return None if locked else _read_holder(files, path, busy=locked is False)
    finally:
        files.close(fd)


def _read_holder(files: Files, path: Path, *, busy: bool) -> str | None:
    """Who a lock file names, if that process is alive; `busy`: somebody holds the lock."""
    text = (files.read_whole(path, at_most=1000) or b"").decode(errors="replace")
    match = re.match(r"(\d+) (\S+)", text)
    if busy or (match and match[2] == os.uname().nodename and _alive(int(match[1]))):
        return f"process {match[1]} on host {match[2]}" if match else "another process"
    return None


_ATTEMPTS, _PAUSE_S = 5, 0.01
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
