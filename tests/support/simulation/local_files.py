"""System calls of a simulated process on a simulated disk, with drawn faults."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from megtool.staging import nested_runs
from megtool.storage import folder_calls
from megtool.storage.files import Files
from tests.support.simulation.disk import Inode, SimulatedDisk, failure
from tests.support.simulation.scheduler import Process

T = TypeVar("T")

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TRANSFERS = ("preadv", "pwrite", "pwritev", "copy_file_range")
_MAY_FAIL = {
    "open": (errno.EIO, errno.EMFILE, errno.ENOSPC),
    "pwrite": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "pwritev": (errno.EIO, errno.ENOSPC),
    "preadv": (errno.EIO,),
    "fsync": (errno.EIO, errno.ENOSPC),
    "ftruncate": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "renameat2": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.EIO, errno.ENOSPC),
    "close": (errno.EIO, errno.EDQUOT),
    "unlink": (errno.EIO,),
    "rmdir": (errno.EIO,),
    "listdir": (errno.EIO,),
    "flock": (errno.EIO,),
}


class LocalFaults:
    """Faults of one process: an errno at call number `at`, and a share of calls that fall short."""

    def __init__(self, rng: random.Random, *, at: int = 0, short: float = 0.0) -> None:
        self.rng, self.at, self.short = rng, at, short
        self.struck = ""

    def draw(self, number: int, name: str) -> int:
        """The errno of this call, or 0."""
        if self.at and number >= self.at and not self.struck and name in _MAY_FAIL:
            self.struck = name
            return self.rng.choice(_MAY_FAIL[name])
        return 0


class SimulatedFiles(Files):
    """`Files` of a simulated process: every system call goes to the disk in memory."""

    def __init__(self, disk: SimulatedDisk, process: Process, faults: LocalFaults) -> None:
        super().__init__()
        self.disk, self.process, self.faults = disk, process, faults
        self._fds: dict[int, Inode] = {}
        process.on_death.append(self._close_all)

    def system(self, function: Callable[..., T], /, *args: Any) -> T:
        """Make one system call on the simulated disk."""
        name = function.__name__
        self.process.step()
        is_of_disk = not args or str(args[0]) != BOOT_ID
        code = self.faults.draw(self.process.calls, name) if is_of_disk else 0
        if code:
            if name == "close":
                self._close(args[0])
            if name == "fsync":
                self._fds[args[0]].unsynced.clear()
            raise failure(code)
        if (
            self.faults.short
            and name in _TRANSFERS
            and self.faults.rng.random() < self.faults.short
        ):
            if self.faults.rng.random() < 0.3:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            args = _halve(name, args)
        version = self.disk.version
        result: T = _CALLS[function](self, *args)
        if self.disk.version != version:
            self.disk.observe()
        return result

    # ---- descriptors

    def _new_fd(self, inode: Inode) -> int:
        number = self.disk.next_fd
        self.disk.next_fd += 1
        self._fds[number] = inode
        return number

    def _inode(self, fd: int) -> Inode:
        inode = self._fds.get(fd)
        if inode is None:
            raise failure(errno.EBADF, fd)
        return inode

    def _close(self, fd: int) -> None:
        inode = self._inode(fd)
        inode.locks.pop(fd, None)
        del self._fds[fd]

    def _close_all(self) -> None:
        for fd in list(self._fds):
            self._close(fd)

    def open_path(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """See open(2)."""
        text = str(path)
        if text == BOOT_ID:
            inode = Inode(0, stat.S_IFREG | 0o444, 0)
            inode.data = bytearray(f"{self.disk.boot:036d}".encode())
            return self._new_fd(inode)
        try:
            inode = self.disk.find(text)
        except OSError as e:
            if not flags & os.O_CREAT or e.errno != errno.ENOENT:
                raise
            inode = self.disk.create(self.disk.parent(text), stat.S_IFREG | (mode & 0o777))
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise failure(errno.EEXIST, path)
        if flags & os.O_DIRECTORY and not inode.is_folder:
            raise failure(errno.ENOTDIR, path)
        if inode.is_folder and flags & (os.O_WRONLY | os.O_RDWR):
            raise failure(errno.EISDIR, path)
        return self._new_fd(inode)

    # ---- contents

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        """See preadv(2)."""
        data, done = self._inode(fd).data, 0
        for buffer in buffers:
            view: Any = np.frombuffer(buffer, np.uint8)
            part = data[offset + done : offset + done + view.nbytes]
            view[: len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
            if len(part) < view.nbytes:
                break
        return done

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        """See pwrite(2)."""
        raw = bytes(data)
        self._inode(fd).write(offset, raw, self.disk.now_ns)
        self.disk.written(self._inode(fd))
        return len(raw)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        """See pwritev(2)."""
        return self.pwrite(fd, b"".join(bytes(b) for b in buffers), offset)

    def copy_file_range(
        self, source: int, target: int, num_bytes: int, offset: int, to: int
    ) -> int:
        """See copy_file_range(2)."""
        if not self.disk.copies:
            raise failure(errno.EOPNOTSUPP)
        data = bytes(self._inode(source).data[offset : offset + num_bytes])
        return self.pwrite(target, data, to) if data else 0

    def ftruncate(self, fd: int, size: int) -> None:
        """See ftruncate(2)."""
        self._inode(fd).resize(size, self.disk.now_ns)
        self.disk.written(self._inode(fd))

    def fsync_fd(self, fd: int) -> None:
        """See fsync(2)."""
        inode = self._inode(fd)
        if inode.is_folder:
            self.disk.flush_names(inode)
        else:
            inode.flush()

    def flock(self, fd: int, kind: int) -> None:
        """See flock(2)."""
        if not self.disk.locks:
            raise failure(errno.ENOLCK)
        inode, is_shared = self._inode(fd), bool(kind & fcntl.LOCK_SH)
        if any(not (is_shared and shared) for f, shared in inode.locks.items() if f != fd):
            raise failure(errno.EWOULDBLOCK)
        inode.locks[fd] = is_shared

    # ---- names

    def mkdir_path(self, path: Any, mode: int = 0o777) -> None:
        """See mkdir(2)."""
        folder, name = self.disk.parent(str(path))
        if name in folder.names:
            raise failure(errno.EEXIST, path)
        self.disk.create((folder, name), stat.S_IFDIR | (mode & 0o755))

    def unlink_entry(self, folder: Inode, name: str) -> None:
        """See unlink(2)."""
        inode = folder.names.get(name)
        if inode is None:
            raise failure(errno.ENOENT, name)
        if inode.is_folder:
            raise failure(errno.EISDIR, name)
        self.disk.change(((folder, name), None))
        self.disk.removed(inode)

    def rmdir_entry(self, folder: Inode, name: str) -> None:
        """See rmdir(2)."""
        inode = folder.names.get(name)
        if inode is None:
            raise failure(errno.ENOENT, name)
        if inode.names:
            raise failure(errno.ENOTEMPTY, name)
        self.disk.change(((folder, name), None))
        self.disk.removed(inode)

    def rename_path(self, source: Any, target: Any) -> None:
        """See rename(2)."""
        old, new = self.disk.parent(str(source)), self.disk.parent(str(target))
        inode, replaced = old[0].names.get(old[1]), new[0].names.get(new[1])
        if inode is None:
            raise failure(errno.ENOENT, source)
        if replaced is not None and replaced.is_folder and replaced.names:
            raise failure(errno.ENOTEMPTY, target)
        if replaced is not None and replaced.is_folder != inode.is_folder:
            raise failure(errno.EISDIR if replaced.is_folder else errno.ENOTDIR, target)
        self.disk.change((old, None), (new, inode))
        if replaced is not None:
            self.disk.removed(replaced)

    def link_path(self, source: Any, target: Any) -> None:
        """See link(2)."""
        inode, (folder, name) = self.disk.find(str(source)), self.disk.parent(str(target))
        if name in folder.names:
            raise failure(errno.EEXIST, target)
        inode.links += 1
        self.disk.change(((folder, name), inode))

    def renameat2(self, source: Any, target: Any, flags: int) -> None:
        """See renameat2(2)."""
        if flags == 1:
            if not self.disk.refuses_overwrite:
                raise failure(errno.EINVAL)
            folder, name = self.disk.parent(str(target))
            if name in folder.names:
                raise failure(errno.EEXIST, target)
            self.rename_path(source, target)
            return
        if not self.disk.exchanges:
            raise failure(errno.EINVAL)
        old, new = self.disk.parent(str(source)), self.disk.parent(str(target))
        first, second = old[0].names.get(old[1]), new[0].names.get(new[1])
        if first is None or second is None:
            raise failure(errno.ENOENT, target)
        self.disk.change((old, second), (new, first))

    def stat_path(self, path: Any) -> os.stat_result:
        """See stat(2)."""
        return self.disk.status(self.disk.find(str(path)))

    def listdir(self, path: Any) -> list[str]:
        """See readdir(3); the order is that of a hash table."""
        inode = self._inode(path) if isinstance(path, int) else self.disk.find(str(path))
        if not inode.is_folder:
            raise failure(errno.ENOTDIR, path)
        return sorted(inode.names, reverse=True)

    def is_folder_at(self, name: str, fd: int) -> bool | None:
        """See `storage.folder_calls.is_folder_at`."""
        inode = self._inode(fd).names.get(name)
        return None if inode is None else inode.is_folder

    def open_folder_at(self, name: str, fd: int) -> int:
        """See `storage.folder_calls.open_folder_at`."""
        inode = self._inode(fd).names.get(name)
        if inode is None:
            raise failure(errno.ENOENT, name)
        return self._new_fd(inode)

    def scan(self, path: Path) -> list[tuple[str, bool]]:
        """See `nested_runs._scan`."""
        return [
            (name, True)
            for name, inode in self.disk.find(str(path)).names.items()
            if inode.is_folder
        ]


def _halve(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for about half the bytes."""
    if name == "pwrite":
        data = bytes(args[1])
        return args[0], data[: max(1, len(data) // 2)], args[2]
    if name == "copy_file_range":
        return (*args[:2], max(1, args[2] // 2), *args[3:])
    first = np.frombuffer(args[1][0], np.uint8) if args[1] and args[1][0].nbytes else None
    return args if first is None else (args[0], (first[: max(1, len(first) // 2)],), args[2])


_CALLS: dict[Any, Callable[..., Any]] = {
    os.open: SimulatedFiles.open_path,
    os.close: SimulatedFiles._close,
    os.fstat: lambda self, fd: self.disk.status(self._inode(fd)),
    os.stat: SimulatedFiles.stat_path,
    os.lstat: SimulatedFiles.stat_path,
    os.preadv: SimulatedFiles.preadv,
    os.pwrite: SimulatedFiles.pwrite,
    os.pwritev: SimulatedFiles.pwritev,
    os.copy_file_range: SimulatedFiles.copy_file_range,
    os.ftruncate: SimulatedFiles.ftruncate,
    os.fsync: SimulatedFiles.fsync_fd,
    fcntl.flock: SimulatedFiles.flock,
    os.mkdir: SimulatedFiles.mkdir_path,
    os.unlink: lambda self, path: self.unlink_entry(*self.disk.parent(str(path))),
    os.rmdir: lambda self, path: self.rmdir_entry(*self.disk.parent(str(path))),
    os.link: SimulatedFiles.link_path,
    os.rename: SimulatedFiles.rename_path,
    os.listdir: SimulatedFiles.listdir,
    os.statvfs: lambda self, path: SimpleNamespace(f_bavail=1 << 20, f_frsize=4096),
    folder_calls.renameat2: SimulatedFiles.renameat2,
    folder_calls.is_folder_at: SimulatedFiles.is_folder_at,
    folder_calls.unlink_at: lambda self, name, fd: self.unlink_entry(self._inode(fd), name),
    folder_calls.rmdir_at: lambda self, name, fd: self.rmdir_entry(self._inode(fd), name),
    folder_calls.open_folder_at: SimulatedFiles.open_folder_at,
    nested_runs._scan: SimulatedFiles.scan,
}
