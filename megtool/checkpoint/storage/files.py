"""System calls on the files of a checkpoint, each complete or a typed error."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from megtool.checkpoint.storage.transfer import Buffer, FileTransfer, to_storage_error
from megtool.errors import FormatError, StorageError


class Files(FileTransfer):
    """The only place that makes system calls for checkpoints."""

    # ---- open files

    def open_read(self, path: Path) -> int:
        """Open a file or a folder for reading."""
        return self._open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_write(self, path: Path) -> int:
        """Open a file for reading and writing; created if missing, never truncated."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _open(self, path: Path, *flags: int) -> int:
        fd = self.call(path, "open", os.open, path, *flags)
        self._paths[fd] = path
        return fd

    def open_memory(self, path: Path, data: Buffer) -> int:
        """An in-memory file that holds `data` until it is closed; errors name `path`."""
        fd = self.call(path, "find memory for", os.memfd_create, "megtool", os.MFD_CLOEXEC)
        self._paths[fd] = path
        try:
            self.pwrite_all(fd, data, 0)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set the size of an open file; new bytes read as zeros."""
        self.call(fd, "resize", os.ftruncate, fd, num_bytes)

    def read_whole(self, path: Path, *, at_most: int | None = None) -> bytes | None:
        """All bytes of a small file; None if there is no file.

        Raises:
            FormatError: the file is longer than `at_most` bytes.
        """
        status = self.stat(path)
        if status is None:
            return None
        if at_most is not None and status.st_size > at_most:
            raise FormatError(f"{status.st_size:,} bytes, over the limit {at_most:,}", file=path)
        fd = self.open_read(path)
        try:
            data = bytearray(status.st_size)
            self.pread_into(fd, memoryview(data), 0)
            return bytes(data)
        finally:
            self.close(fd)

    def lock(self, fd: int) -> bool | None:
        """Lock an open file against other processes until it is closed.

        Returns False if another process holds it, None if the file system has no locks.
        """
        while True:
            try:
                self.system(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except InterruptedError:
                continue
            except BlockingIOError:
                return False
            except OSError as e:
                if e.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                    return None
                raise to_storage_error(e, fd, "lock") from e
            return True

    # ---- durability

    def fsync(self, path: Path) -> None:
        """Make the contents of a file durable.

        A failure is final: the kernel may drop what it could not write, and a second fsync would
        then report success.
        """
        fd = self.open_read(path)
        try:
            self.call(path, "flush", os.fsync, fd)
        finally:
            self.close(fd)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a folder durable, if its file system supports that."""
        try:
            self.fsync(path)
        except StorageError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno != errno.EINVAL:
                raise

    # ---- names

    def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
        """Rename atomically; without `replace` an existing file at `target` is an error."""
        if not replace:
            if self._renameat2(source, target, _NOREPLACE):
                return
            if self.stat(target) is not None:
                raise StorageError("exists", file=target)
        self.call(target, "rename to", os.rename, source, target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names atomically; False if the system does not support it."""
        return self._renameat2(first, second, _EXCHANGE)

    def _renameat2(self, source: Path, target: Path, flags: int) -> bool:
        try:
            self.call(target, "rename to", renameat2, source, target, flags)
        except StorageError as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in (
                errno.ENOSYS,
                errno.EINVAL,
                errno.EOPNOTSUPP,
            ):
                return False
            raise
        return True

    def mkdir(self, path: Path) -> bool:
        """Create a folder; False if it exists."""
        try:
            self.call(path, "create folder", os.mkdir, path)
        except StorageError as e:
            if isinstance(e.__cause__, FileExistsError):
                return False
            raise
        return True

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists; links are not followed."""
        status = self._stat(os.lstat, path)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            self.call(path, "remove", os.unlink, path)
            return
        for name in self.names(path):
            self.remove(path / name)
        self.call(path, "remove", os.rmdir, path)

    def remove_empty(self, path: Path) -> bool:
        """Remove an empty folder; False if it is not empty or missing."""
        try:
            self.call(path, "remove", os.rmdir, path)
        except StorageError as e:
            codes = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in codes:
                return False
            raise
        return True

    # ---- queries

    def stat(self, path: Path) -> os.stat_result | None:
        """The status of `path`, following links; None if it does not exist."""
        return self._stat(os.stat, path)

    def lstat(self, path: Path) -> os.stat_result | None:
        """The status of `path`, not following links; None if it does not exist."""
        return self._stat(os.lstat, path)

    def _stat(
        self, function: Callable[[Path], os.stat_result], path: Path
    ) -> os.stat_result | None:
        try:
            return self.call(path, "look at", function, path)
        except StorageError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open file."""
        return self.call(fd, "look at", os.fstat, fd)

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(self.call(path, "list", os.listdir, path))

    def tree(self, path: Path) -> tuple[list[Path], list[Path]]:
        """All files below a folder, and all folders including `path`."""
        files: list[Path] = []
        folders = [path]
        for folder in folders:  # the list grows during the loop
            for name in self.names(folder):
                status = self.lstat(folder / name)
                is_folder = status is not None and stat.S_ISDIR(status.st_mode)
                (folders if is_folder else files).append(folder / name)
        return files, folders

    def free_space(self, path: Path) -> int:
        """Free bytes on the file system of `path`, without quotas."""
        status = self.call(path, "look at", os.statvfs, path)
        return status.f_bavail * status.f_frsize


_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2(2)
_AT_FDCWD = -100


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
