"""Files: every system call on the files of a checkpoint, each finished or failing in words."""

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
    """The operating system, as far as checkpoints need it: the one place that calls it."""

    # ---- open files

    def open_read(self, path: Path) -> int:
        """Open a file or a folder for reading."""
        return self._open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_write(self, path: Path) -> int:
        """Open a file for reading and writing; one that is missing is made, none is emptied."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _open(self, path: Path, *how: int) -> int:
        fd = self.call(path, "open", os.open, path, *how)
        self._paths[fd] = path
        return fd

    def open_memory(self, path: Path, data: Buffer) -> int:
        """A file in memory alone that holds `data` and is gone once closed; `path` is its name in
        messages."""
        fd = self.call(path, "find memory for", os.memfd_create, "megtool", os.MFD_CLOEXEC)
        self._paths[fd] = path
        try:
            self.pwrite_all(fd, data, 0)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Give an open file its size; what is new reads as zeros."""
        self.call(fd, "resize", os.ftruncate, fd, num_bytes)

    def read_whole(self, path: Path, *, at_most: int | None = None) -> bytes | None:
        """All bytes of a small file, None where there is none.

        Raises:
            FormatError: it is longer than `at_most` bytes.
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

        Returns False when another holds it, None when this file system knows no locks.
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
        """Make the names in a folder durable, where its file system has a notion of that."""
        try:
            self.fsync(path)
        except StorageError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno != errno.EINVAL:
                raise

    # ---- names

    def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
        """Rename, atomically; without `replace` an existing file at `target` is an error."""
        if not replace:
            if self._renameat2(source, target, _NOREPLACE):
                return
            if self.stat(target) is not None:
                raise StorageError("exists", file=target)
        self.call(target, "rename to", os.rename, source, target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names, atomically; False (and nothing done) where the system cannot."""
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
        """Make a folder; False when there is one already."""
        try:
            self.call(path, "make folder", os.mkdir, path)
        except StorageError as e:
            if isinstance(e.__cause__, FileExistsError):
                return False
            raise
        return True

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all it holds; links are not followed. May be missing."""
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
        """Remove a folder; False when it holds something or is missing."""
        try:
            self.call(path, "remove", os.rmdir, path)
        except StorageError as e:
            codes = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in codes:
                return False
            raise
        return True

    # ---- questions

    def stat(self, path: Path) -> os.stat_result | None:
        """What is at `path` (links followed), None where there is nothing."""
        return self._stat(os.stat, path)

    def lstat(self, path: Path) -> os.stat_result | None:
        """What is at `path` (a link itself), None where there is nothing."""
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
        """What an open file is."""
        return self.call(fd, "look at", os.fstat, fd)

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(self.call(path, "list", os.listdir, path))

    def tree(self, path: Path) -> tuple[list[Path], list[Path]]:
        """Files below a folder, and folders from `path` downwards."""
        files: list[Path] = []
        folders = [path]
        for folder in folders:  # grows while it runs
            for name in self.names(folder):
                status = self.lstat(folder / name)
                is_folder = status is not None and stat.S_ISDIR(status.st_mode)
                (folders if is_folder else files).append(folder / name)
        return files, folders

    def free_space(self, path: Path) -> int:
        """Bytes that may still be written to the file system of `path`; quotas are not seen."""
        status = self.call(path, "look at", os.statvfs, path)
        return status.f_bavail * status.f_frsize


_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2(2)
_AT_FDCWD = -100


def renameat2(source: Path, target: Path, flags: int) -> None:
    """The system call of that name, which Python's library does not offer.

    Raises:
        OSError: it failed; ENOSYS where there is none.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    names = os.fsencode(source), os.fsencode(target)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
