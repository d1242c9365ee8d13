"""Objects of stores that are open, under numbers like file descriptors."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megtool.checkpoint.storage.location import StorePath
from megtool.checkpoint.storage.store import ConditionError, ObjectInfo, ObjectMissingError
from megtool.checkpoint.storage.store_index import store_index, to_status
from megtool.errors import FormatError, SourceChangedError, StorageError

if TYPE_CHECKING:
    from megtool.checkpoint.storage.transfer import Buffer

FIRST_NUMBER = 1 << 24
"""Numbers of open objects begin here, far above those of files."""

_NUMBERS = itertools.count(FIRST_NUMBER)


class OpenObject(Protocol):
    """An object that is open for reading, or one under construction."""

    @property
    def path(self) -> StorePath:
        """Where it is."""

    def status(self) -> os.stat_result:
        """Its status, as that of a file."""

    def read_into(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Fill the buffers, in order, with the bytes at `offset`."""

    def write(self, data: bytes | Buffer, offset: int) -> None:
        """Write bytes at `offset`."""

    def truncate(self, num_bytes: int) -> None:
        """Set the size."""

    def copy_from(
        self, source: OpenObject, source_offset: int, offset: int, num_bytes: int
    ) -> bool:
        """Let the store copy bytes from another object; False if it cannot."""

    def close(self) -> None:
        """End the use of one number."""


class ReadableObject:
    """An object that is read, in the version that it had when it was opened."""

    def __init__(self, path: StorePath, info: ObjectInfo) -> None:
        self.path = path
        self.info = info
        self._store = path.store

    def status(self) -> os.stat_result:
        """See `OpenObject`."""
        return to_status(self.info)

    def read_into(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `OpenObject`.

        Raises:
            FormatError: the object is shorter.
            SourceChangedError: it was replaced or removed since it was opened.
            StorageError: the store refused.
        """
        num_bytes = sum(b.nbytes for b in buffers)
        if not num_bytes:
            return
        if offset + num_bytes > self.info.size:
            raise FormatError(
                f"truncated: ends at byte {self.info.size:,}, {offset + num_bytes:,} expected",
                file=self.path,
                hint="the object is incomplete",
                error_id="truncated-file",
            )
        data = np.frombuffer(self._read(offset, num_bytes), np.uint8)
        done = 0
        for buffer in buffers:
            target: Any = np.frombuffer(buffer, np.uint8)
            target[:] = data[done : done + buffer.nbytes]
            done += buffer.nbytes

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        try:
            data = self._store.read(self.info.key, offset, num_bytes, version=self.info.version)
        except (ConditionError, ObjectMissingError) as e:
            raise SourceChangedError(
                "the object was replaced or removed while it was read",
                file=self.path,
                hint="wait until nothing writes to the source, then run again",
            ) from e
        if data.nbytes != num_bytes:
            raise StorageError(
                f"the store sent {data.nbytes:,} of {num_bytes:,} bytes at byte {offset:,}",
                file=self.path,
                hint="it, or a proxy in front of it, ignores ranges",
            )
        return data

    def write(self, data: bytes | Buffer, offset: int) -> None:
        """Refuse: an object cannot be changed."""
        raise StorageError("an object that is read cannot be written", file=self.path)

    def truncate(self, num_bytes: int) -> None:
        """Refuse: an object cannot be changed."""
        raise StorageError("an object that is read cannot be resized", file=self.path)

    def copy_from(
        self, source: OpenObject, source_offset: int, offset: int, num_bytes: int
    ) -> bool:
        """False: an object cannot be changed."""
        return False

    def close(self) -> None:
        """See `OpenObject`."""


@functools.cache
def open_objects() -> OpenObjects:
    """The open objects of this process."""
    return OpenObjects()


class OpenObjects:
    """Open objects by number, and those under construction by their path. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[int, OpenObject] = {}
        self._under_construction: dict[StorePath, OpenObject] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> OpenObject:
        return self._open[number]

    def add(self, opened: OpenObject) -> int:
        """A number for an open object."""
        with self._lock:
            number = next(_NUMBERS)
            self._open[number] = opened
            return number

    def open_read(self, path: StorePath) -> int:
        """Open an object for reading; one under construction gives what is known of it.

        Raises:
            StorageError: there is no such object, or the store refused.
        """
        opened = self._under_construction.get(path)
        if opened is None:
            info = store_index().info(path)
            if info is None:
                raise StorageError(
                    "there is no such object", file=path, error_id="source-not-found"
                )
            opened = ReadableObject(path, info)
        return self.add(opened)

    def open_write(self, path: StorePath) -> int:
        """Open an object that is under construction.

        Raises:
            StorageError: no stage has begun it.
        """
        opened = self._under_construction.get(path)
        if opened is None:
            raise StorageError("an object cannot be changed in its place", file=path)
        return self.add(opened)

    def construct(self, path: StorePath, opened: OpenObject | None) -> None:
        """Begin an object under construction, or (None) end it."""
        with self._lock:
            if opened is None:
                self._under_construction.pop(path, None)
            else:
                self._under_construction[path] = opened

    def constructed(self, path: StorePath) -> OpenObject | None:
        """The object under construction at a path."""
        return self._under_construction.get(path)

    def close(self, number: int) -> None:
        """End the use of a number."""
        with self._lock:
            opened = self._open.pop(number)
        opened.close()
