"""What stores said about their objects, remembered, so that one listing answers many questions."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import threading
from collections import Counter

from megtool.checkpoint.storage.location import StorePath
from megtool.checkpoint.storage.store import Listing, ObjectInfo
from megtool.errors import StorageError

_HEADS = 2
"""A folder of which more objects are asked for than this is listed."""


@functools.cache
def store_index() -> StoreIndex:
    """The index of this process."""
    return StoreIndex()


def inode_of(version: str) -> int:
    """A number for a version, as `st_ino` of an object."""
    return int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")


def to_status(info: ObjectInfo | None) -> os.stat_result:
    """The status of an object, or of a folder (None), as that of a file."""
    if info is None:
        return os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, os.geteuid(), 0, 0, 0, 0, 0))
    seconds = info.modified_ns // 10**9
    fields = (stat.S_IFREG | 0o644, inode_of(info.version), 0, 1, os.geteuid(), 0, info.size)
    names = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), info.modified_ns)
    return os.stat_result((*fields, seconds, seconds, seconds), names)


class StoreIndex:
    """Objects and folders by path. Thread-safe.

    A path is answered from the listing of its folder if there is one, else by a request. What is
    remembered is the state when it was asked: `forget` before asking whether it has changed.
    """

    def __init__(self) -> None:
        self._folders: dict[StorePath, dict[str, ObjectInfo | None]] = {}
        self._single: dict[StorePath, ObjectInfo] = {}
        self._asked: Counter[StorePath] = Counter()
        self._lock = threading.Lock()

    def info(self, path: StorePath) -> ObjectInfo | None:
        """The object at a path; None if there is none.

        Raises:
            StorageError: the store refused.
        """
        if not path.key:
            return None
        folder = path.parent
        with self._lock:
            known = self._folders.get(folder)
            if known is not None:
                return known.get(path.name)
            if path in self._single:
                return self._single[path]
            self._asked[folder] += 1
            is_listed = self._asked[folder] > _HEADS and bool(folder.key)
        if is_listed:
            return self._list(folder).get(path.name)
        info = path.store.head(path.key)
        if info is not None:
            with self._lock:
                self._single[path] = info
        return info

    def stat(self, path: StorePath) -> os.stat_result | None:
        """The status of an object or a folder; None if there is neither."""
        if len(path.parts) < 2:
            return to_status(None)
        info = self.info(path)
        if info is not None:
            return to_status(info)
        with self._lock:
            above = self._folders.get(path.parent) if path.key else None
            if above is not None and path.name not in above:
                return None
        return to_status(None) if self._list(path) or not path.key else None

    def names(self, path: StorePath) -> list[str]:
        """Names in a folder, sorted.

        Raises:
            StorageError: there is no such folder, or the store refused.
        """
        names = sorted(self._list(path))
        if not names and path.key:
            raise StorageError("there is nothing below this name", file=path)
        return names

    def _list(self, path: StorePath) -> dict[str, ObjectInfo | None]:
        with self._lock:
            if path in self._folders:
                return self._folders[path]
        found = path.store.list(path.key)
        entries = _by_name(found)
        with self._lock:
            self._folders[path] = entries
        return entries

    def forget(self, path: StorePath) -> None:
        """Forget what is at a path, below it, and in the folder that it is in."""
        with self._lock:
            for known in [p for p in self._folders if p == path or path in p.parents]:
                del self._folders[known]
            for single in [p for p in self._single if p == path or path in p.parents]:
                del self._single[single]
            self._folders.pop(path.parent, None)


def _by_name(listing: Listing) -> dict[str, ObjectInfo | None]:
    out: dict[str, ObjectInfo | None] = {p.rpartition("/")[2]: None for p in listing.prefixes}
    for info in listing.objects:
        name = info.key.rpartition("/")[2]
        if name:  # a key that ends with a slash is a marker of a folder, made by some tools
            out[name] = info
    return out
