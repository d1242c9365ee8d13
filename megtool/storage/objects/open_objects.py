"""Objects of stores that are open, under numbers like file descriptors."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from megtool.errors import SourceChangedError, StorageError
from megtool.storage.objects.cache import Range, Read, object_cache
from megtool.storage.objects.index import store_index, to_status
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.read_pool import read_pool

if TYPE_CHECKING:
    from megtool.storage.stores.protocol import ObjectInfo

FIRST_NUMBER = 1 << 24
"""Numbers of open objects begin here, far above those of files."""

Buffer = memoryview | NDArray[Any]
"""Memory to read or write, C-contiguous, of any element type."""

_NUMBERS = itertools.count(FIRST_NUMBER)


def is_object(number: int) -> bool:
    """Whether an open file is an object of a store."""
    return number >= FIRST_NUMBER


class OpenObject(Protocol):
    """An object that is open for reading, or one under construction."""

    @property
    def path(self) -> ObjectPath:
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


SMALL_BYTES = 64 << 10
"""Reads of fewer bytes are answered from blocks that other reads share (see `ObjectCache`)."""

REQUEST_BYTES = 2 << 20
"""Larger reads become several requests at a time."""

GAP_SHARE = 64
"""Reads of one batch become one request where gaps are at most this part of what is read."""

SHORT_RUN_BYTES = 64 << 10
"""Runs of a batch that are shorter, and not near, are read in blocks."""


class ReadableObject:
    """An object that is read, in the version that it had when it was opened."""

    def __init__(self, path: ObjectPath, info: ObjectInfo) -> None:
        self.path = path
        self.info = info
        self._store = path.store
        self._owner = str(path), info.version, info.size, info.modified_ns

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
        runs = []
        for buffer in buffers:
            if buffer.nbytes:
                runs.append((offset, as_bytes(buffer)))
                offset += buffer.nbytes
        if runs:
            self.read_batch(runs)

    def read_batch(self, runs: Sequence[tuple[int, memoryview]], span: Range | None = None) -> None:
        """Fill memory with runs (offset, memory), with many requests at a time.

        Runs that are near to each other become one request. Short ones that are not are read in
        blocks of `span`, the range in which others like them lie, if it is given.

        Raises:
            FormatError, SourceChangedError, StorageError: see `read_into`.
        """
        jobs, short = [], []
        groups = list(_group_runs(runs))
        if len(groups) == 1 and sum(memory.nbytes for _, memory in runs) < SMALL_BYTES:
            self._read_small(groups[0])
            return
        for group in groups:
            begin, end = group[0][0], group[-1][0] + group[-1][1].nbytes
            self._check_range(begin, end - begin)
            payload = sum(memory.nbytes for _, memory in group)
            if span is not None and payload < SHORT_RUN_BYTES and span[1] - span[0] > payload:
                short += group
            else:
                jobs.append(functools.partial(self._read_group, group, begin, end))
        if short and span is not None:
            object_cache().read_runs(self._owner, span, short, self._read)
        if jobs:
            read_pool().run(jobs)

    def _read_small(self, group: Sequence[tuple[int, memoryview]]) -> None:
        begin, end = group[0][0], group[-1][0] + group[-1][1].nbytes
        self._check_range(begin, end - begin)
        data = object_cache().read_window(
            self._owner, self.info.size, begin, end - begin, self._read
        )
        for offset, memory in group:
            memory[:] = data[offset - begin : offset - begin + memory.nbytes]

    def _read_group(self, group: Sequence[tuple[int, memoryview]], begin: int, end: int) -> None:
        data = self._read(begin, end - begin)
        for offset, memory in group:
            memory[:] = data[offset - begin : offset - begin + memory.nbytes]

    def prefetch(self, ranges: Iterable[Range]) -> Iterator[tuple[Hashable, Range, Read]]:
        """What `ObjectCache.prefetch` takes to request ranges, clipped to the object."""
        for begin, end in ranges:
            begin, end = max(begin, 0), min(end, self.info.size)
            if begin < end:
                yield self._owner, (begin, end), self._read

    def _check_range(self, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > self.info.size:
            from megtool.storage.stores.protocol import truncated

            raise truncated(
                self.path, self.info.size, offset + num_bytes, hint="the object is incomplete"
            )

    def _read(self, offset: int, num_bytes: int) -> memoryview:
        from megtool.storage.stores.protocol import ConditionError, ObjectMissingError

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
        return data.cast("B") if data.format != "B" else data

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


class MemoryObject:
    """Memory of this process, opened as an object under construction.

    What is read from files is read into it directly, and tiles are assigned to it.
    """

    def __init__(self, path: ObjectPath, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data

    def status(self) -> os.stat_result:
        """See `OpenObject`."""
        from megtool.storage.stores.protocol import ObjectInfo

        info = ObjectInfo(key=self.path.key, size=self.data.nbytes, version="", modified_ns=0)
        return to_status(info)

    def read_into(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `OpenObject`."""
        for buffer in buffers:
            memory = as_bytes(buffer)
            memory[:] = self.data.data[offset : offset + memory.nbytes]
            offset += memory.nbytes

    def write(self, data: bytes | Buffer, offset: int) -> None:
        """See `OpenObject`."""
        memory = memoryview(data) if isinstance(data, bytes) else as_bytes(data)
        self.data.data[offset : offset + memory.nbytes] = memory

    def truncate(self, num_bytes: int) -> None:
        """Refuse another size: the memory is the caller's."""
        if num_bytes != self.data.nbytes:
            raise StorageError("memory that was given cannot be resized", file=self.path)

    def copy_from(
        self, source: OpenObject, source_offset: int, offset: int, num_bytes: int
    ) -> bool:
        """False: no store has the bytes."""
        return False

    def close(self) -> None:
        """See `OpenObject`."""


def as_bytes(buffer: Buffer) -> memoryview:
    """The memory of a C-contiguous buffer, as bytes."""
    view = memoryview(cast(Any, buffer))
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _group_runs(runs: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Runs as groups for one request each, ascending; long runs are cut evenly."""
    group: list[tuple[int, memoryview]] = []
    payload = 0
    for begin, memory in sorted(runs, key=lambda run: run[0]):
        count = -(-memory.nbytes // REQUEST_BYTES)
        step = -(-memory.nbytes // max(count, 1))
        for skip in range(0, memory.nbytes, max(step, 1)):
            offset, part = begin + skip, memory[skip : skip + step]
            if group and (
                (offset - group[-1][0] - group[-1][1].nbytes) * GAP_SHARE > payload
                or offset + part.nbytes - group[0][0] > REQUEST_BYTES
            ):
                yield group
                group, payload = [], 0
            group.append((offset, part))
            payload += part.nbytes
    if group:
        yield group


@functools.cache
def open_objects() -> OpenObjects:
    """The open objects of this process."""
    return OpenObjects()


class OpenObjects:
    """Open objects by number, and those under construction by their path. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[int, OpenObject] = {}
        self._under_construction: dict[ObjectPath, OpenObject] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> OpenObject:
        return self._open[number]

    def path(self, number: int) -> ObjectPath | None:
        """Where an open object is; None if the number is closed."""
        opened = self._open.get(number)
        return None if opened is None else opened.path

    def add(self, opened: OpenObject) -> int:
        """A number for an open object."""
        with self._lock:
            number = next(_NUMBERS)
            self._open[number] = opened
            return number

    def open_read(self, path: ObjectPath) -> int:
        """Open an object for reading; one under construction gives what is known of it.

        Raises:
            StorageError: there is no such object, or the store refused.
        """
        opened = self._under_construction.get(path)
        if opened is None:
            info = store_index().info(path)
            if info is None:
                from megtool.storage.stores.protocol import ObjectMissingError

                raise ObjectMissingError("there is no such object", file=path)
            opened = ReadableObject(path, info)
        return self.add(opened)

    def prefetch(self, ranges_by_path: Sequence[tuple[ObjectPath, Sequence[Range]]]) -> None:
        """Request ranges of objects, many at a time, so that small reads find them.

        Objects that are missing, or under construction, are left to the reads.

        Raises:
            StorageError: the store refused.
        """
        requests: list[tuple[Hashable, Range, Read]] = []
        for path, ranges in ranges_by_path:
            info = None if path in self._under_construction else store_index().info(path)
            if info is not None:
                requests += ReadableObject(path, info).prefetch(
                    (a + info.size if a < 0 else a, b or info.size) for a, b in ranges
                )
        object_cache().prefetch(requests)

    def open_write(self, path: ObjectPath) -> int:
        """Open an object that is under construction.

        Raises:
            StorageError: no stage has begun it.
        """
        opened = self._under_construction.get(path)
        if opened is None:
            raise StorageError("an object cannot be changed in its place", file=path)
        return self.add(opened)

    def construct(self, path: ObjectPath, opened: OpenObject | None) -> None:
        """Begin an object under construction, or (None) end it."""
        with self._lock:
            if opened is None:
                self._under_construction.pop(path, None)
            else:
                self._under_construction[path] = opened

    def constructed(self, path: ObjectPath) -> OpenObject | None:
        """The object under construction at a path."""
        return self._under_construction.get(path)

    def close(self, number: int) -> None:
        """End the use of a number."""
        with self._lock:
            opened = self._open.pop(number)
        opened.close()
