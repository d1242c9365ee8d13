"""Small reads of objects, answered from blocks that are requested once and shared by all threads.

A header is read in a few small steps and a transposed tensor in many short runs: each would be a
request. Here they become requests of whole blocks. At most `CACHE_BYTES` stay in memory. Beyond
them, blocks that may be needed again go to an unnamed temporary file.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import IO

from megtool.storage.stores.read_pool import read_pool

CACHE_BYTES = 64 << 20
"""Bytes of blocks in memory."""

SPILL_BYTES = 4 << 30
"""Bytes of blocks in the temporary file."""

WINDOW_BYTES = 64 << 10
"""What the first small read of an object asks for; an object up to four times as large is read
whole."""

BLOCK_BYTES = 1 << 20
"""The blocks in which tensors of short runs are read."""

MOST_WINDOW_BYTES = 512 << 10

Read = Callable[[int, int], memoryview]
"""Requests bytes of an object: an offset and their number."""

Range = tuple[int, int]
"""The first byte and the end."""

_Key = tuple[Hashable, int, int]


@functools.cache
def object_cache() -> ObjectCache:
    """The cache of this process."""
    return ObjectCache()


class ObjectCache:
    """Blocks of objects by their object, begin and end. Thread-safe.

    `peak_bytes` is the most that was in memory at a time, what is being requested included.
    """

    def __init__(self, *, cache_bytes: int = CACHE_BYTES, spill_bytes: int = SPILL_BYTES) -> None:
        self._limit = cache_bytes
        self._blocks: OrderedDict[_Key, memoryview] = OrderedDict()
        self._windows: dict[Hashable, list[Range]] = {}  # ascending
        self._spilled = set[_Key]()  # blocks for the temporary file
        self._expected = set[_Key]()  # under way
        self._used = 0
        self._spill = _Spill(spill_bytes)
        self._changed = threading.Condition()
        self.peak_bytes = 0

    # ---- headers

    def read_window(
        self, owner: Hashable, size: int, offset: int, num_bytes: int, read: Read
    ) -> memoryview:
        """Bytes of an object of `size` bytes, with those around them for the next small read.

        `read` requests them. A read that goes on where a window ended gets one twice as large.
        """
        with self._changed:
            windows = self._windows.get(owner, [])
            after = bisect_right(windows, (offset, size))
            near = windows[max(0, after - 2) : after]
        before = 0
        for begin, end in near:
            if offset + num_bytes <= end:
                data = self._get((owner, begin, end), read, keep=False)
                return data[offset - begin : offset - begin + num_bytes]
            if offset <= end:
                before = max(before, end - begin)
        begin, end = _window(size, offset, num_bytes, min(2 * before, MOST_WINDOW_BYTES))
        data = self._get((owner, begin, end), read, keep=False)
        return data[offset - begin : offset - begin + num_bytes]

    def prefetch(self, requests: Iterable[tuple[Hashable, Range, Read]]) -> None:
        """Request ranges of objects, many at a time, so that small reads find them."""
        jobs: list[Callable[[], None]] = []
        for owner, (begin, end), read in requests:
            with self._changed:
                known = self._windows.get(owner, ())
                if any(a <= begin and end <= b for a, b in known):
                    continue
            key = owner, begin, end
            jobs.append(functools.partial(self._fetch_only, key, read))
        if jobs:
            read_pool().run(jobs)

    def _fetch_only(self, key: _Key, read: Read) -> None:
        self._get(key, read, keep=False)

    # ---- tensors of short runs

    def read_runs(
        self, owner: Hashable, span: Range, runs: Sequence[tuple[int, memoryview]], read: Read
    ) -> None:
        """Fill memory with runs (offset, memory) that lie in `span`, block by block.

        Blocks are cut from the beginning of the span, so all reads of one span share them.
        """
        needed: dict[int, list[tuple[int, memoryview]]] = {}
        for offset, memory in runs:
            done = 0
            while done < memory.nbytes:
                number, skip = divmod(offset + done - span[0], BLOCK_BYTES)
                count = min(memory.nbytes - done, BLOCK_BYTES - skip)
                needed.setdefault(number, []).append((skip, memory[done : done + count]))
                done += count

        def fill(number: int) -> None:
            begin = span[0] + number * BLOCK_BYTES
            key = owner, begin, min(begin + BLOCK_BYTES, span[1])
            data = self._get(key, read, keep=True)
            for skip, part in needed[number]:
                part[:] = data[skip : skip + part.nbytes]

        read_pool().run([functools.partial(fill, n) for n in sorted(needed)])

    # ---- blocks

    def _get(self, key: _Key, read: Read, *, keep: bool) -> memoryview:
        """A block, from memory, from the temporary file, or requested by one of the threads that
        wait for it. `keep`: the temporary file takes it when memory needs room."""
        _, begin, end = key
        with self._changed:
            while True:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
                    return block
                if key not in self._expected and self._make_room(end - begin):
                    break
                self._changed.wait()
            self._expected.add(key)
        data: memoryview | None = None
        try:
            data = self._spill.get(key) if keep else None
            if data is None:
                data = read(begin, end - begin)
        finally:
            with self._changed:
                self._expected.discard(key)
                if data is None:
                    self._used -= end - begin
                else:
                    self._blocks[key] = data
                    if keep:
                        self._spilled.add(key)
                    else:
                        insort(self._windows.setdefault(key[0], []), (begin, end))
                self._changed.notify_all()
        return data

    def _make_room(self, num_bytes: int) -> bool:
        """Drop the blocks that were used least recently; False if those under way fill the rest."""
        while self._used + num_bytes > self._limit and self._blocks:
            self._drop(*self._blocks.popitem(last=False))
        if self._used + num_bytes > self._limit and self._expected:
            return False
        self._used += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._used)
        return True

    def _drop(self, key: _Key, block: memoryview) -> None:
        self._used -= block.nbytes
        if key in self._spilled:
            self._spilled.remove(key)
            self._spill.put(key, block)
            return
        windows = self._windows[key[0]]
        windows.remove(key[1:])
        if not windows:
            del self._windows[key[0]]

    def clear(self) -> None:
        """Forget all blocks that are not under way."""
        with self._changed:
            self._used -= sum(b.nbytes for b in self._blocks.values())
            self._blocks.clear()
            self._windows.clear()
            self._spilled.clear()
            self._spill.clear()


def _window(size: int, offset: int, num_bytes: int, at_least: int) -> Range:
    """The range to request for a small read."""
    if size <= 4 * WINDOW_BYTES:
        return 0, size
    length = max(num_bytes, at_least, WINDOW_BYTES)
    if offset + num_bytes > size - WINDOW_BYTES:
        return min(offset, size - WINDOW_BYTES), size
    return offset, min(offset + length, size)


class _Spill:
    """Blocks of up to `BLOCK_BYTES` in an unnamed temporary file; the oldest are replaced."""

    def __init__(self, num_bytes: int) -> None:
        self._slots = max(1, num_bytes // BLOCK_BYTES)
        self._places: OrderedDict[_Key, int] = OrderedDict()
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def get(self, key: _Key) -> memoryview | None:
        """The block, if it is there."""
        with self._lock:
            slot = self._places.get(key)
            if slot is None or self._file is None:
                return None
            length = key[2] - key[1]
            data = os.pread(self._file.fileno(), length, slot * BLOCK_BYTES)
        return memoryview(data) if len(data) == length else None

    def put(self, key: _Key, data: memoryview) -> None:
        """Store a block; without room on the disk it is not stored."""
        with self._lock:
            if key in self._places:
                return
            slot = len(self._places)
            if slot >= self._slots:
                slot = self._places.popitem(last=False)[1]
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(prefix="megtool-")  # noqa: SIM115
                if os.pwrite(self._file.fileno(), data, slot * BLOCK_BYTES) == data.nbytes:
                    self._places[key] = slot
            except OSError:
                self._slots = max(1, len(self._places))

    def clear(self) -> None:
        """Forget all blocks, and give the space back."""
        with self._lock:
            self._places.clear()
            if self._file is not None:
                self._file.close()
                self._file = None
