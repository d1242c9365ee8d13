"""System calls on the files of a checkpoint, each complete or a typed error."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megtool.errors import FormatError, StorageError
from megtool.storage.file_kinds import (
    check_own_file,
    check_own_folder,
    check_readable_kind,
)
from megtool.storage.folder_calls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    is_folder_at,
    open_folder_at,
    renameat2,
    rmdir_at,
    unlink_at,
)
from megtool.storage.location.path import StorePath
from megtool.storage.objects.cache import object_cache
from megtool.storage.objects.index import store_index
from megtool.storage.objects.open_objects import FIRST_NUMBER, Buffer, ReadableObject
from megtool.storage.objects.transfer import FileTransfer, to_storage_error

_SAFELY = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # opening a FIFO does not block

MAX_WHOLE_BYTES = 256 << 20
"""The largest file that is read whole: configurations, tokenizers, small states."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


class Files(FileTransfer):
    """The only place that makes system calls for checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, tuple[int, bool]] = {}  # device -> see `_probe`

    # ---- open files

    def open_read(self, path: Path) -> int:
        """Open a file or a folder for reading; links are followed.

        Raises:
            FormatError: it is a FIFO, a socket or a device. It is not opened.
            StorageError: it does not exist, or cannot be read.
        """
        if isinstance(path, StorePath):
            return self._number(self.objects.open_read(path), path)
        if status := self.stat(path):
            check_readable_kind(path, status)
        fd = self._open(path, os.O_RDONLY | _SAFELY)
        return self._check_open(fd, lambda status: check_readable_kind(path, status))

    def open_write(self, path: Path) -> int:
        """Open a file that megtool writes, for reading and writing.

        It is created if missing, and never truncated. Links are not followed.

        Raises:
            DestinationError: it is no regular file with one name that belongs to this user.
            StorageError: it cannot be opened.
        """
        if isinstance(path, StorePath):
            return self._number(self.objects.open_write(path), path)
        return self._open_own(path, os.O_RDWR | os.O_CREAT, 0o666)

    def open_own(self, path: Path) -> int:
        """Open a file that megtool wrote, for reading; see `open_write`."""
        if isinstance(path, StorePath):
            return self.open_read(path)
        return self._open_own(path, os.O_RDONLY)

    def _open_own(self, path: Path, flags: int, *mode: int) -> int:
        if status := self.lstat(path):
            self.check_own_file(path, status)
        fd = self._open(path, flags | os.O_NOFOLLOW | _SAFELY, *mode)
        return self._check_open(fd, lambda status: self.check_own_file(path, status))

    def _check_open(self, fd: int, check: Callable[[os.stat_result], None]) -> int:
        """Close the file again if it has become another one since it was looked at."""
        try:
            check(self.fstat(fd))
        except BaseException:
            self.close(fd)
            raise
        return fd

    def check_own_file(self, path: Path, status: os.stat_result) -> None:
        """Refuse a file that a run of this user cannot have made.

        Raises:
            DestinationError: it is not regular, has a second name, or another owner.
        """
        check_own_file(path, status, is_owner=self._is_owner(path, status))

    def _is_owner(self, path: Path, status: os.stat_result) -> bool:
        """Whether this user owns a file, as far as its file system tells users apart."""
        return status.st_uid == os.geteuid() or status.st_uid == self._probe(path, status)[0]

    def _probe(self, path: Path, status: os.stat_result) -> tuple[int, bool]:
        """The owner of a new file next to `path`, and whether its file system stores modes.

        NFS may map root to nobody; FAT and some network file systems have one owner and one mode.
        """
        if status.st_dev not in self._owners:
            name = path.with_name(f".megtool-{secrets.token_hex(8)}")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = self._open(name, flags, 0o600)
            except StorageError:
                return os.geteuid(), True
            try:
                probe = self.fstat(fd)
            finally:
                self.close(fd)
                self.call(name, "remove", os.unlink, name)
            self._owners[status.st_dev] = probe.st_uid, not probe.st_mode & 0o077
        return self._owners[status.st_dev]

    def _number(self, number: int, path: Path) -> int:
        self._paths[number] = path
        return number

    def refresh(self, path: Path) -> None:
        """Forget what a store said about a path and what is below it."""
        if isinstance(path, StorePath):
            store_index().forget(path)

    def load_tree(self, path: Path) -> None:
        """Let a store list everything below a folder at once, if that is not too much."""
        if isinstance(path, StorePath):
            store_index().load_tree(path)

    def prefetch(self, requests: Sequence[tuple[Path, Sequence[tuple[int, int]]]]) -> None:
        """Request ranges of objects, many at a time, so that small reads of headers find them.

        Ranges are a first byte and an end; a negative first byte counts from the end of the object,
        and the end 0 is its end. Local files are left to the system.

        Raises:
            StorageError: the store refused.
        """
        objects = [(path, ranges) for path, ranges in requests if isinstance(path, StorePath)]
        if objects:
            self.objects.prefetch(objects)

    def prefetch_open(self, fd: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Like `prefetch`, for an object that is open."""
        if fd >= FIRST_NUMBER:
            opened = self.objects[fd]
            if isinstance(opened, ReadableObject):
                object_cache().prefetch(opened.prefetch(ranges))

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
        if fd >= FIRST_NUMBER:
            self.objects[fd].truncate(num_bytes)
            return
        if self.recorder is not None:
            self.recorder.forget(self._paths.get(fd))
        self.call(fd, "resize", os.ftruncate, fd, num_bytes)

    def read_whole(
        self, path: Path, *, at_most: int | None = MAX_WHOLE_BYTES, is_own: bool = False
    ) -> bytes | None:
        """All bytes of a small file; None if there is no file. `is_own`: see `open_own`.

        `at_most` is None for a file of any size, which only megtool itself can have written.

        Raises:
            FormatError: the file is longer than `at_most` bytes, or no regular file.
            DestinationError: with `is_own`, a run of this user cannot have made it.
            StorageError: it cannot be read.
        """
        if (self.lstat(path) if is_own else self.stat(path)) is None:
            return None
        fd = self.open_own(path) if is_own else self.open_read(path)
        try:
            status = self.fstat(fd)
            if at_most is not None and status.st_size > at_most:
                raise _oversize(path, status.st_size, at_most)
            data = bytearray(status.st_size)
            self.pread_into(fd, memoryview(data), 0)
            return bytes(data)
        finally:
            self.close(fd)

    def lock(self, fd: int, *, shared: bool = False) -> bool | None:
        """Lock an open file against other processes until it is closed.

        `shared`: other shared locks are allowed. Returns False if another process holds it, None if
        the file system has no locks.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            try:
                self.system(fcntl.flock, fd, kind | fcntl.LOCK_NB)
            except InterruptedError:
                continue
            except BlockingIOError:
                return False
            except OSError as e:
                if e.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                    return None
                raise to_storage_error(e, fd, "lock") from e
            return True

    def replace_file(self, path: Path, data: bytes, temporary: str, *, fsync: bool = True) -> None:
        """Replace a small file: write `temporary` in its folder, and rename that, or put an object.

        With `fsync`, a power loss leaves the old file or the new one, and never an empty one.

        Raises:
            DestinationError: a run of this user cannot have made what has that name.
            StorageError: it cannot be written; the old file stays.
        """
        if isinstance(path, StorePath):
            path.store.put(path.key, data)
            self.refresh(path)
            return
        new = path.with_name(temporary)
        fd = self.open_write(new)
        try:
            self.truncate(fd, 0)
            self.pwrite_all(fd, data, 0)
            if fsync:
                self.call(fd, "flush", os.fsync, fd)
        except BaseException:
            self.close(fd)
            self.remove(new)
            raise
        self.close(fd)
        self.rename(new, path)
        if fsync:
            self.fsync_dir(path.parent)

    def create_file(self, path: Path, data: bytes, temporary: str) -> bool:
        """Create a small file with all of its contents at once; False if it exists already.

        Of several hosts only one creates it, on file systems with and without locks.

        Raises:
            DestinationError: a run of this user cannot have made what has the temporary name.
            StorageError: it cannot be written.
        """
        new = path.with_name(temporary)
        self.remove(new)  # perhaps still a second name of what a killed run has created
        fd = self.open_write(new)
        try:
            self.pwrite_all(fd, data, 0)
            self.call(fd, "flush", os.fsync, fd)  # after a power loss it is whole, or not there
        finally:
            self.close(fd)
        try:
            self.call(path, "create", os.link, new, path)
        except StorageError as e:
            if isinstance(e.__cause__, FileExistsError):
                return False
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in _NO_LINKS:
                raise
            return self._create_alone(path, data)
        finally:
            self.remove(new)
        return True

    def _create_alone(self, path: Path, data: bytes) -> bool:
        """Create a file where files have one name; its contents come a moment later."""
        try:
            fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
        except StorageError as e:
            if isinstance(e.__cause__, FileExistsError):
                return False
            raise
        try:
            self.pwrite_all(fd, data, 0)
        finally:
            self.close(fd)
        return True

    # ---- durability

    def fsync(self, path: Path) -> None:
        """Make the contents of a file durable.

        A failure is final: the kernel may drop what it could not write, and a second fsync would
        then report success.
        """
        if isinstance(path, StorePath):
            return  # what a store has accepted is durable
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
            if self._renameat2(source, target, RENAME_NOREPLACE):
                return
            if self.stat(target) is not None:
                raise StorageError("exists", file=target)
        self.call(target, "rename to", os.rename, source, target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names atomically; False if the system does not support it."""
        return self._renameat2(first, second, RENAME_EXCHANGE)

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

    def mkdir(self, path: Path, mode: int = 0o777) -> bool:
        """Create a folder; False if it exists, or is in a store, which has none."""
        if isinstance(path, StorePath):
            return False
        try:
            self.call(path, "create folder", os.mkdir, path, mode)
        except StorageError as e:
            if isinstance(e.__cause__, FileExistsError):
                return False
            raise
        return True

    def make_own_folder(self, path: Path, *, is_private: bool = False) -> bool:
        """Create a folder that megtool writes in; False if it exists.

        `is_private`: no other user may write in it, so that nothing can be planted there.

        Raises:
            DestinationError: a run of this user cannot have made what exists.
        """
        if self.mkdir(path, 0o700 if is_private else 0o777):
            return True
        self.check_own_folder(path, is_private=is_private)
        return False

    def check_own_folder(self, path: Path, *, is_private: bool = False) -> None:
        """Refuse a folder, which may be missing, that a run of this user cannot have made.

        Raises:
            DestinationError: it is no folder, a link to one, or another user's; or `is_private`,
                and others may write in it.
        """
        status = self.lstat(path)
        if status is None:
            return
        is_folder = stat.S_ISDIR(status.st_mode)
        check_own_folder(
            path,
            status,
            is_owner=not is_folder or self._is_owner(path, status),
            is_open_to_others=is_private
            and is_folder
            and bool(status.st_mode & 0o022)
            and self._probe(path, status)[1],
        )

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents, if it exists; links are not followed."""
        status = self.lstat(path)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            self.call(path, "remove", os.unlink, path)
            return
        fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._remove_contents(path, fd)
        finally:
            self.close(fd)
        self.call(path, "remove", os.rmdir, path)

    def _remove_contents(self, path: Path, fd: int) -> None:
        """Empty a folder by its descriptor: nobody can put a link in its place meanwhile."""
        for name in sorted(self.call(path, "list", os.listdir, fd)):
            full = path / name
            is_folder = self.call(full, "look at", is_folder_at, name, fd)
            if is_folder is None:
                continue
            if not is_folder:
                self.call(full, "remove", unlink_at, name, fd)
                continue
            inner = self.call(full, "open", open_folder_at, name, fd)
            self._paths[inner] = full
            try:
                self._remove_contents(full, inner)
            finally:
                self.close(inner)
            self.call(full, "remove", rmdir_at, name, fd)

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
        if isinstance(path, StorePath):
            opened = self.objects.constructed(path)
            return opened.status() if opened else store_index().stat(path)
        try:
            return self.call(path, "look at", function, path)
        except StorageError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open file."""
        if fd >= FIRST_NUMBER:
            return self.objects[fd].status()
        return self.call(fd, "look at", os.fstat, fd)

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        if isinstance(path, StorePath):
            return store_index().names(path)
        return sorted(self.call(path, "list", os.listdir, path))

    def tree(self, path: Path) -> tuple[list[Path], list[Path]]:
        """All files below a folder, and all folders including `path`; links count as files.

        Raises:
            FormatError: one is a FIFO, a socket or a device.
        """
        return self._walk(path, check_readable_kind)

    def own_tree(self, path: Path) -> tuple[list[Path], list[Path]]:
        """All files below a folder that megtool writes, and all folders including `path`.

        Raises:
            DestinationError: a run of this user cannot have made one of the files.
        """
        return self._walk(path, self.check_own_file)

    def _walk(
        self, path: Path, check: Callable[[Path, os.stat_result], None]
    ) -> tuple[list[Path], list[Path]]:
        files: list[Path] = []
        folders = [path]
        for folder in folders:  # the list grows during the loop
            for name in self.names(folder):
                full = folder / name
                status = self.lstat(full)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    folders.append(full)
                    continue
                if status is not None:
                    check(full, status)
                files.append(full)
        return files, folders

    def free_space(self, path: Path) -> int:
        """Free bytes on the file system of `path`, without quotas."""
        status = self.call(path, "look at", os.statvfs, path)
        return status.f_bavail * status.f_frsize


def read_file(path: Path, at_most: int = MAX_WHOLE_BYTES) -> bytes:
    """All bytes of a small file that must be there.

    Raises:
        FormatError: it is a FIFO, a socket or a device, or has more than `at_most` bytes.
        StorageError: it is missing, or cannot be read.
    """
    files = Files()
    fd = files.open_read(path)
    try:
        size = files.fstat(fd).st_size
        if size > at_most:
            raise _oversize(path, size, at_most)
        data = bytearray(size)
        files.pread_into(fd, memoryview(data), 0)
    finally:
        files.close(fd)
    return bytes(data)


def _oversize(path: Path, size: int, at_most: int) -> FormatError:
    return FormatError(
        f"the file has {size:,} bytes, more than the {at_most:,} that are read",
        file=path,
        hint="no program writes it as large: fetch it again",
    )


def read_limited(path: Path, at_most: int) -> bytes:
    """Return all bytes of a file that a user names, which may be a pipe, of `at_most` bytes.

    Raises:
        FormatError: it has more.
        StorageError: it is missing, a folder, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data: bytes = file.read(at_most + 1)
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
    if len(data) > at_most:
        raise FormatError(f"the file has more than {at_most:,} bytes", file=path)
    return data


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a file that is read in the body of a `with`.

    Raises:
        FormatError: it is a FIFO, a socket or a device.
        StorageError: it is missing, or cannot be opened.
    """
    files = Files()
    fd = files.open_read(path)
    try:
        yield fd
    finally:
        files.close(fd)


def is_regular_file(path: Path) -> bool:
    """Whether `path` is a regular file, or a link to one; False if there is nothing.

    Raises:
        FormatError: it is a FIFO, a socket or a device.
        StorageError: it cannot be looked at.
    """
    status = Files().stat(path)
    if status is None:
        return False
    check_readable_kind(path, status)
    return stat.S_ISREG(status.st_mode)
