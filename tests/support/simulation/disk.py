"""A file system in memory that loses what was not flushed, as a crash of the machine does.

The model is that of ALICE (Pillai et al., OSDI 2014). A file's unsynced writes reach the disk in
any order and in any part, page by page; `fsync` of a file makes its bytes and its size durable, but
not its name. A change of names is atomic, and durable when one of its folders was flushed; others
may be lost in any order, except that changes of one name keep theirs. After a failed `fsync` the
pages count as clean: a second one succeeds and writes nothing.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

PAGE = 64
"""Bytes that reach the disk together: small, because simulated files are."""

Name = tuple["Inode", str]


def failure(code: int, path: object = None) -> OSError:
    """An error as a system call raises it."""
    return OSError(code, os.strerror(code), str(path) if path is not None else None)


@dataclass(eq=False, slots=True)
class Inode:
    """A file (`data`) or a folder (`names`), each as programs see it and as the disk has it."""

    number: int
    mode: int
    created_ns: int
    changed_ns: int = 0
    data: bytearray = field(default_factory=bytearray)
    flushed: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: the size
    names: dict[str, Inode] = field(default_factory=dict)
    flushed_names: dict[str, Inode] = field(default_factory=dict)
    locks: dict[int, bool] = field(default_factory=dict)  # descriptor -> is it shared
    is_watched: bool = False
    links: int = 1

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)

    def write(self, offset: int, data: bytes, now_ns: int) -> None:
        """Write bytes, which are not durable yet."""
        end = offset + len(data)
        if end > len(self.data):
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = data
        self.unsynced.append((offset, data))
        self.changed_ns = now_ns

    def resize(self, size: int, now_ns: int) -> None:
        """Set the size, which is not durable yet."""
        if size != len(self.data):
            _resize(self.data, size)
            self.unsynced.append((size, None))
            self.changed_ns = now_ns

    def flush(self) -> None:
        """Make the contents durable."""
        for offset, data in self.unsynced:
            _apply(self.flushed, offset, data)
        self.unsynced.clear()

    def crash(self, rng: random.Random) -> None:
        """Keep what happens to have reached the disk."""
        kept = self.flushed
        size = len(kept)
        sizes = [size]
        share = rng.choice((0.0, 0.5, 0.9, 1.0))
        image = bytearray(kept)
        for offset, data in self.unsynced:
            if data is None:
                if rng.random() < share:
                    _resize(image, offset)
                size = offset
                sizes.append(size)
                continue
            size = max(size, offset + len(data))
            sizes.append(size)
            begin = 0
            while begin < len(data):
                end = min(begin + PAGE - (offset + begin) % PAGE, len(data))
                if rng.random() < share:
                    _apply(image, offset + begin, data[begin:end])
                begin = end
        if share < 1 and self.unsynced:
            _resize(image, rng.choice((len(image), *sizes)))
        self.flushed, self.data = image, bytearray(image)
        self.unsynced.clear()


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _apply(target: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        _resize(target, offset)
        return
    if offset + len(data) > len(target):
        _resize(target, offset + len(data))
    target[offset : offset + len(data)] = data


@dataclass(frozen=True, slots=True)
class _Change:
    """One atomic change of names: what each names afterwards (None: nothing)."""

    entries: tuple[tuple[Name, Inode | None], ...]

    def apply(self) -> None:
        for (folder, name), inode in self.entries:
            if inode is None:
                folder.flushed_names.pop(name, None)
            else:
                folder.flushed_names[name] = inode


class SimulatedDisk:
    """The tree of one machine, and what of it would survive a crash.

    `exchanges` and `refuses_overwrite` say whether renameat2 has these flags, `locks` whether there
    are locks, `copies` whether copy_file_range works, `reuses` whether a new file may have the
    inode number of a removed one.
    """

    def __init__(
        self,
        *,
        exchanges: bool = True,
        refuses_overwrite: bool = True,
        locks: bool = True,
        copies: bool = True,
        reuses: bool = True,
    ) -> None:
        self.exchanges, self.refuses_overwrite, self.locks = exchanges, refuses_overwrite, locks
        self.copies, self.reuses = copies, reuses
        self.clock: Callable[[], int] = lambda: 10**18
        self.boot = 1
        self.version = 0  # counts changes of names, and of watched files
        self.next_fd = 1 << 20  # below the numbers of open objects
        self.observe: Callable[[], None] = lambda: None
        self._next = 2
        self._free: list[int] = []
        self._removed: list[int] = []
        self.root = Inode(1, stat.S_IFDIR | 0o755, self.now_ns)
        self._changes: list[_Change] = []

    @property
    def now_ns(self) -> int:
        """The time that a change gets: that of the last tick, 4 ms apart."""
        return self.clock() // 4_000_000 * 4_000_000

    # ---- paths

    def find(self, path: str) -> Inode:
        """The inode at an absolute path.

        Raises:
            OSError: there is none.
        """
        inode = self.root
        for name in path.split("/"):
            if not name:
                continue
            if not inode.is_folder:
                raise failure(errno.ENOTDIR, path)
            found = inode.names.get(name)
            if found is None:
                raise failure(errno.ENOENT, path)
            inode = found
        return inode

    def parent(self, path: str) -> Name:
        """The folder of a path, and the name in it.

        Raises:
            OSError: there is no such folder.
        """
        above, _, name = path.rstrip("/").rpartition("/")
        folder = self.find(above)
        if not folder.is_folder:
            raise failure(errno.ENOTDIR, path)
        return folder, name

    # ---- changes of names

    def change(self, *entries: tuple[Name, Inode | None]) -> None:
        """Change names at once; it is not durable yet."""
        for (folder, name), inode in entries:
            if inode is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = inode
        self._changes.append(_Change(entries))
        self.version += 1

    def create(self, name: Name, mode: int) -> Inode:
        """A new file or folder."""
        if self.reuses and self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        inode = Inode(number, mode, self.now_ns, self.now_ns)
        self.change((name, inode))
        return inode

    def removed(self, inode: Inode) -> None:
        """A name of an inode is gone; after the last its number is free for others."""
        inode.links -= 1
        if not inode.links:
            self._removed.append(inode.number)

    def flush_names(self, folder: Inode) -> None:
        """Make the names in a folder durable, with the changes that came before on these names."""
        needed: set[tuple[int, str]] = set()
        rest: list[_Change] = []
        chosen: list[_Change] = []
        for change in reversed(self._changes):
            keys = {(id(f), name) for (f, name), _ in change.entries}
            if any(f is folder for (f, _), _ in change.entries) or keys & needed:
                needed |= keys
                chosen.append(change)
            else:
                rest.append(change)
        for change in reversed(chosen):
            change.apply()
        self._changes = rest[::-1]

    # ---- the machine

    def crash(self, rng: random.Random) -> None:
        """Lose power: what was not durable stays, is lost, or stays in part."""
        share = rng.choice((0.0, 0.5, 0.9, 1.0))
        is_ordered = rng.random() < 0.5  # as with one journal of metadata, such as ext4's
        dirty: set[tuple[int, str]] = set()
        for change in self._changes:
            keys = {(id(f), name) for (f, name), _ in change.entries}
            if keys & dirty or (is_ordered and dirty) or rng.random() >= share:
                dirty |= keys
            else:
                change.apply()
        self._changes.clear()
        folders, seen = [self.root], {id(self.root)}
        for folder in folders:  # the list grows during the loop
            folder.names = dict(folder.flushed_names)
            for name in sorted(folder.names):
                inode = folder.names[name]
                if id(inode) in seen:
                    inode.links += 1
                    if inode.is_folder:  # a folder has one name: the later change is lost too
                        del folder.names[name], folder.flushed_names[name]
                    continue
                seen.add(id(inode))
                inode.links = 1
                inode.locks.clear()
                if inode.is_folder:
                    folders.append(inode)
                else:
                    inode.crash(rng)
        self._removed.clear()
        self.boot += 1
        self.version += 1

    def settle(self) -> None:
        """Make everything durable, as time does."""
        for change in self._changes:
            change.apply()
        self._changes.clear()
        folders = [self.root]
        for folder in folders:
            for inode in folder.names.values():
                if inode.is_folder:
                    folders.append(inode)
                else:
                    inode.flush()
        self._free += self._removed
        self._removed.clear()

    def written(self, inode: Inode) -> None:
        """The contents of a file changed."""
        self.version += inode.is_watched

    def tree(self, path: str) -> dict[str, bytes] | None:
        """All files below a path, as programs see them, or None; from now on they are watched."""
        try:
            top = self.find(path)
        except OSError:
            return None
        if not top.is_folder:
            return {"": bytes(top.data)}
        out: dict[str, bytes] = {}
        folders = [("", top)]
        for prefix, folder in folders:
            for name, inode in folder.names.items():
                if inode.is_folder:
                    folders.append((f"{prefix}{name}/", inode))
                else:
                    inode.is_watched = True
                    out[prefix + name] = bytes(inode.data)
        return out

    def put(self, path: str, data: bytes) -> Inode:
        """Place a durable file, with its folders."""
        folder = self.root
        *above, name = [part for part in path.split("/") if part]
        for part in above:
            inode = folder.names.get(part)
            folder = inode or self.create((folder, part), stat.S_IFDIR | 0o755)
        inode = folder.names.get(name) or self.create((folder, name), stat.S_IFREG | 0o644)
        inode.data = bytearray(data)
        inode.flushed = bytearray(data)
        self.flush_all_names()
        return inode

    def flush_all_names(self) -> None:
        """Make all names durable."""
        for change in self._changes:
            change.apply()
        self._changes.clear()

    def status(self, inode: Inode) -> os.stat_result:
        """What `stat` says of an inode."""
        num_bytes = len(inode.data)
        seconds = inode.changed_ns // 10**9
        fields = (inode.mode, inode.number, 1, inode.links, os.geteuid(), 0, num_bytes)
        ns = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), inode.changed_ns)
        more = {**ns, "st_blocks": -(-num_bytes // 512)}
        return os.stat_result((*fields, seconds, seconds, seconds), more)
