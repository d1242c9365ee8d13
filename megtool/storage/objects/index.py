"""What stores said about their objects, remembered, so that one listing answers many questions."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import threading
from collections import Counter
from typing import TYPE_CHECKING

from megtool.errors import StorageError
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.schemes import find_scheme

if TYPE_CHECKING:
    from megtool.storage.stores.protocol import Listing, ObjectInfo

_HEADS = 2
"""A folder of which more objects are asked for than this is listed."""

MOST_LISTED = 20_000
"""A folder with as many objects, at any depth, is listed folder by folder."""


@functools.cache
def store_index() -> StoreIndex:
    """The index of this process."""
    return StoreIndex()


def inode_of(version: str) -> int:
    """A number for a version, as `st_ino` of an object; listings may leave out its quotes."""
    version = version.removeprefix("W/").strip('"')
    return int.from_bytes(hashlib.blake2b(version.encode(), digest_size=7).digest(), "big")


def to_status(info: ObjectInfo | None) -> os.stat_result:
    """The status of an object, or of a folder (None), as that of a file."""
    if info is None:
        return os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, os.geteuid(), 0, 0, 0, 0, 0))
    # The time is of no use beside a version: listings and heads round it differently.
    modified = 0 if info.version else info.modified_ns // 10**9 * 10**9
    fields = (stat.S_IFREG | 0o644, inode_of(info.version), 0, 1, os.geteuid(), 0, info.size)
    names = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), modified)
    return os.stat_result((*fields, *[modified // 10**9] * 3), names)


def lists_all(path: ObjectPath) -> bool:
    """Whether a listing tells all that is in a folder; that of a web server may be known names."""
    return find_scheme(path.scheme).lists_all


class StoreIndex:
    """Objects and folders by path. Thread-safe.

    A path is answered from the listing of its folder if there is one, else by a request. What is
    remembered is the state when it was asked: `forget` before asking whether it has changed.
    """

    def __init__(self) -> None:
        self._folders: dict[ObjectPath, dict[str, ObjectInfo | None]] = {}
        self._single: dict[ObjectPath, ObjectInfo] = {}
        self._num_heads: Counter[ObjectPath] = Counter()
        self._trees = set[ObjectPath]()  # folders that are known to any depth
        self._staged: dict[ObjectPath, StagedObjects] = {}
        self._lock = threading.Lock()

    def info(self, path: ObjectPath) -> ObjectInfo | None:
        """The object at a path; None if there is none.

        Raises:
            StorageError: the store refused.
        """
        if not path.key:
            return None
        if (staged := self._find_staged(path)) is not None:
            return staged.objects.get(path)
        folder = path.parent
        with self._lock:
            known = self._folders.get(folder)
            if known is not None and (path.name in known or lists_all(path)):
                return known.get(path.name)
            if path in self._single:
                return self._single[path]
            self._num_heads[folder] += 1
            is_listed = self._num_heads[folder] > _HEADS and bool(folder.key) and lists_all(path)
        if is_listed:
            return self._list(folder).get(path.name)
        info = path.store.head(path.key)
        if info is not None:
            with self._lock:
                self._single[path] = info
        return info

    def stat(self, path: ObjectPath) -> os.stat_result | None:
        """The status of an object or a folder; None if there is neither."""
        if len(path.parts) < 2:
            return to_status(None)
        with self._lock:
            is_folder = bool(self._folders.get(path))
        info = None if is_folder else self.info(path)
        if info is not None:
            return to_status(info)
        if (staged := self._find_staged(path)) is not None:
            return to_status(None) if path in staged.folders else None
        with self._lock:
            above = self._folders.get(path.parent) if path.key else None
            if above is not None and path.name not in above and lists_all(path):
                return None
        return to_status(None) if self._list(path) or not path.key else None

    def names(self, path: ObjectPath) -> list[str]:
        """Names in a folder, sorted.

        Raises:
            StorageError: there is no such folder, or the store refused.
        """
        if (staged := self._find_staged(path)) is not None:
            return sorted(staged.folders.get(path, ()))
        names = sorted(self._list(path))
        if not names and path.key:
            raise StorageError("there is nothing below this name", file=path)
        return names

    def stage(self, root: ObjectPath) -> StagedObjects:
        """Let what is at a path and below it be what a stage says, until `unstage`."""
        staged = StagedObjects(root)
        with self._lock:
            self._staged[root] = staged
        return staged

    def unstage(self, root: ObjectPath) -> None:
        """Ask the store again about a path and what is below it."""
        with self._lock:
            self._staged.pop(root, None)
        self.forget(root)

    def is_staged(self, path: ObjectPath) -> bool:
        """Whether a stage of this process says what is at a path."""
        return self._find_staged(path) is not None

    def _find_staged(self, path: ObjectPath) -> StagedObjects | None:
        if not self._staged:
            return None
        return next((s for p in (path, *path.parents) if (s := self._staged.get(p))), None)

    def _list(self, path: ObjectPath) -> dict[str, ObjectInfo | None]:
        with self._lock:
            if path in self._folders:
                return self._folders[path]
        listing = path.store.list(path.key)
        entries = _by_name(listing)
        with self._lock:
            self._folders[path] = entries
        return entries

    def load_tree(self, path: ObjectPath, *, most: int = MOST_LISTED) -> bool:
        """List everything below a folder in as few requests as there are thousands of objects.

        False, and nothing is remembered, if there are more than `most` objects.

        Raises:
            StorageError: the store refused.
        """
        with self._lock:
            if path in self._trees:
                return True
        if not path.key or not lists_all(path):
            return False
        listing = path.store.list(path.key, recursive=True, most=most)
        if len(listing.objects) >= most:
            return False
        folders = _by_folder(path, listing)
        with self._lock:
            self._folders.update(folders)
            self._trees.add(path)
        return True

    def forget(self, path: ObjectPath) -> None:
        """Forget what is at a path, below it, and in the folder that it is in."""
        with self._lock:
            for known in [p for p in self._folders if p == path or path in p.parents]:
                del self._folders[known]
            for single in [p for p in self._single if p == path or path in p.parents]:
                del self._single[single]
            for tree in [p for p in self._trees if p == path or path in p.parents]:
                self._trees.remove(tree)
            self._trees.difference_update(path.parents)
            self._folders.pop(path.parent, None)


class StagedObjects:
    """Objects of a checkpoint under construction, whatever the store has of them already."""

    def __init__(self, root: ObjectPath) -> None:
        self.root = root
        self.objects: dict[ObjectPath, ObjectInfo] = {}
        self.folders: dict[ObjectPath, set[str]] = {}

    def set(self, path: ObjectPath, info: ObjectInfo) -> None:
        """Add or replace an object."""
        self.objects[path] = info
        while path != self.root:
            self.folders.setdefault(path.parent, set()).add(path.name)
            path = path.parent


def _by_name(listing: Listing) -> dict[str, ObjectInfo | None]:
    out: dict[str, ObjectInfo | None] = {p.rpartition("/")[2]: None for p in listing.prefixes}
    for info in listing.objects:
        name = info.key.rpartition("/")[2]
        if name:  # a key that ends with a slash is a marker of a folder, made by some tools
            out[name] = info
    return out


def _by_folder(
    root: ObjectPath, listing: Listing
) -> dict[ObjectPath, dict[str, ObjectInfo | None]]:
    """What is in each folder below a folder, and in itself, from a listing of any depth."""
    by_key: dict[str, dict[str, ObjectInfo | None]] = {root.key: {}}
    for info in listing.objects:
        folder, _, name = info.key.rpartition("/")
        if name:
            by_key.setdefault(folder, {})[name] = info
        while folder != root.key:
            above, _, inner = folder.rpartition("/")
            entries = by_key.setdefault(above, {})
            if inner in entries:
                break
            entries[inner] = None
            folder = above
    bucket = root
    while bucket.key:
        bucket = bucket.parent
    return {bucket / key: entries for key, entries in by_key.items()}
