"""A cache of file descriptors: thousands of files, a few hundred open at a time."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from megtool.storage.files import Files
from megtool.storage.location.path import is_remote


class OpenFiles:
    """Descriptors of many files, of which about `limit` are open at a time.

    Descriptors in use are never closed, so threads may share them: all reads and writes of `Files`
    are at explicit offsets. The least recently used descriptors are closed first.

    Of files that are written together with other processes (`is_shared`) a shared lock is held:
    then NFS writes only the bytes that were written here, and not the rest of their page, which may
    be another host's.
    """

    def __init__(
        self, files: Files, *, writing: bool = False, is_shared: bool = False, limit: int = 256
    ) -> None:
        self._files = files
        self._open = files.open_write if writing else files.open_read
        if is_shared:
            self._open = self._open_shared
        self._limit = limit
        self._entries: OrderedDict[Path, list[int]] = OrderedDict()  # path -> [fd, users]
        self._lock = threading.Lock()

    def _open_shared(self, path: Path) -> int:
        fd = self._files.open_write(path)
        if is_remote(path):  # the parts of an object are not shared through caches
            return fd
        try:
            self._files.lock(fd, shared=True)
        except BaseException:
            self._files.close(fd)
            raise
        return fd

    def acquire(self, path: Path) -> int:
        """The descriptor of `path`, open until `release`."""
        with self._lock:
            if entry := self._entries.get(path):
                entry[1] += 1
                self._entries.move_to_end(path)
                return entry[0]
        fd = self._open(path)  # outside the lock, because it may be slow
        with self._lock:
            entry = self._entries.setdefault(path, [fd, 0])
            entry[1] += 1
            surplus = self._surplus()
        if entry[0] != fd:
            surplus.append(fd)
        for old in surplus:
            self._files.close(old)
        return entry[0]

    def release(self, path: Path) -> None:
        """End one `acquire` of `path`."""
        with self._lock:
            self._entries[path][1] -= 1
            surplus = self._surplus()
        for old in surplus:
            self._files.close(old)

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """The descriptor of `path` for the body of a `with`."""
        fd = self.acquire(path)
        try:
            yield fd
        finally:
            self.release(path)

    def close(self) -> None:
        """Close all files, then raise the first failure."""
        with self._lock:
            fds = [fd for fd, _ in self._entries.values()]
            self._entries.clear()
        with contextlib.ExitStack() as stack:
            for fd in fds:
                stack.callback(self._files.close, fd)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _surplus(self) -> list[int]:
        excess = len(self._entries) - self._limit
        if excess <= 0:
            return []
        idle = (path for path, (_, users) in self._entries.items() if not users)
        oldest = list(itertools.islice(idle, excess))
        return [self._entries.pop(path)[0] for path in oldest]
