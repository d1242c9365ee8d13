"""Reads shards from their first bytes to their last, and lets the disk read on meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.audit.element_sums import SumsCollector, Workspace
from megtool.audit.piece_checksums import CRC32C, ZIP_CRC, ByteRange
from megtool.audit.save_facts import MAIN, SECOND_MOMENT, WEIGHT
from megtool.audit.stored_rows import ShardRow
from megtool.process.threads import BackgroundCall
from megtool.storage.objects.open_objects import is_object
from megtool.transport.reading.reader import CheckpointReader

_WITH_SKETCH = (WEIGHT, MAIN, SECOND_MOMENT)
_AHEAD_BYTES = 128 << 20
_PIECE_BYTES = 2 << 20


class ShardReader:
    """One shard: its place, the sums over its elements, and checksums of its bytes.

    `range` is the range of the file with a known checksum that its bytes are in, if any.
    """

    def __init__(self, reader: CheckpointReader, row: ShardRow, sketch_size: int) -> None:
        self.row, self.kind = row, reader.catalogue.tensors[row.tensor].dtype
        shards = np.array([row.shard], np.int64)
        (self.offset,) = reader.locator.offsets(shards).tolist()
        self.offset += row.skip * self.kind.itemsize
        (number,) = reader.locator.files(shards).tolist()
        self.path = reader.locator.path(number)
        self.num_bytes = self.bytes_of(row.num_rows)
        self.first = row.first_row() or 0
        self.range: ByteRange | None = None
        self.linear = self.zip_linear = 0
        self.alive: NDArray[np.bool_] | None = None
        self.fd = reader.open_files.acquire(self.path)
        self.is_open = True
        self._reader = reader
        self._sketch_size = sketch_size if row.state in _WITH_SKETCH else 0

    def bytes_of(self, rows: int) -> int:
        """The bytes of so many rows."""
        return rows * self.row.width * self.kind.itemsize

    def begin(self, workspace: Workspace) -> None:
        """Prepare for reading in a thread with this workspace."""
        row = self.row
        columns, width, column = 1, 1, 0
        if len(row.shape) > 1:
            columns, width, column = row.shape[-1], row.width, row.lo[-1]
        self.collector = SumsCollector(
            self.kind, columns, self._sketch_size, workspace, is_signed=row.state != SECOND_MOMENT
        )
        self.collector.open_box(column, width)
        if row.has_whole_rows and not row.state:
            self.alive = np.zeros(row.num_rows, bool)

    def read(self, start: int, count: int, buffer: bytearray) -> NDArray[Any]:
        """The elements of some rows."""
        size = self.bytes_of(count)
        if len(buffer) < size:
            buffer.extend(bytes(size - len(buffer)))
        view = memoryview(buffer)[:size]
        self._reader.files.pread_into(self.fd, view, self.offset + self.bytes_of(start))
        self.linear = CRC32C.chain(self.linear, view)
        if self.range is not None and self.range.kind is ZIP_CRC:
            self.zip_linear = ZIP_CRC.chain(self.zip_linear, view)
        array = np.frombuffer(view, self.kind.view)
        first = start * self.row.width if len(self.row.shape) < 2 else start
        alive = self.collector.add(array, self.first + first)
        if alive is not None and self.alive is not None:
            self.alive[start : start + count] = alive
        return array

    def finish(self) -> int:
        """Fold the sums; the digest of the shard's bytes."""
        self.collector.close_box()
        if self.range is not None:
            is_zip = self.range.kind is ZIP_CRC
            linear = self.zip_linear if is_zip else self.linear
            self.range.add(self.offset, self.num_bytes, linear)
        return CRC32C.finish(self.linear, self.num_bytes)

    def close(self) -> None:
        """Release the file."""
        self.is_open = False
        self._reader.open_files.release(self.path)


class ReadAhead:
    """Asks the kernel for bytes that other threads are about to read, at most so many ahead.

    It does so in a thread of its own: asking waits while the disk has as many requests as it takes.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[ShardReader, int, int]] = deque()
        self._ahead = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: BackgroundCall[None] | None = None

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.wait()

    def plan(self, readers: Sequence[ShardReader], step: int) -> None:
        """Shards of one box are read side by side, `step` rows at a time, in the order of these
        calls. Those in stores are fetched otherwise."""
        readers = [r for r in readers if not is_object(r.fd)]
        if not readers:
            return
        num_rows = readers[0].row.num_rows
        step *= max(1, _PIECE_BYTES // max(r.bytes_of(step) for r in readers))
        with self._changed:
            for start in range(0, num_rows, step):
                count = min(step, num_rows - start)
                self._pieces += [
                    (r, r.offset + r.bytes_of(start), r.bytes_of(count)) for r in readers
                ]
            self._changed.notify()
        if self._thread is None:
            self._thread = BackgroundCall(self._advise, is_awaited=False)

    def take(self, num_bytes: int) -> None:
        """So many bytes are read now: as many more may be asked for."""
        with self._changed:
            self._ahead = max(0, self._ahead - num_bytes)
            self._changed.notify()

    def _advise(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_room)
                if self._is_closed:
                    return
                reader, offset, size = self._pieces.popleft()
                if not reader.is_open:
                    continue
                self._ahead += size
            with contextlib.suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(reader.fd, offset, size, os.POSIX_FADV_WILLNEED)

    def _has_room(self) -> bool:
        return self._is_closed or bool(self._pieces and self._ahead < _AHEAD_BYTES)
