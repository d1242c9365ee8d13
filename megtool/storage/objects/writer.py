"""An object under construction: writes at any offset become parts, uploaded when they are full."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from megtool.errors import StorageError
from megtool.storage.objects.index import to_status
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.open_objects import Buffer, OpenObject, ReadableObject
from megtool.storage.objects.part_buffers import PartBuffer, PartBuffers
from megtool.storage.objects.part_layout import PART_BYTES, CopyRun, Coverage, PartLayout
from megtool.storage.stores.protocol import ObjectInfo, UploadedPart

_STEP = 4 << 20  # bytes of a source read at a time


class PartTarget(Protocol):
    """What uploads the parts of an object: a stage."""

    def touch(self, writer: ObjectWriter, part: int) -> None:
        """This thread has written to a part."""

    def upload(self, writer: ObjectWriter, part: int, data: memoryview) -> UploadedPart:
        """Upload a part."""

    def copy(self, writer: ObjectWriter, part: int, run: CopyRun) -> UploadedPart | None:
        """Let the server copy a part; None if it cannot."""

    def uploaded(self, writer: ObjectWriter, part: int) -> None:
        """A part is in the store."""

    def complete(self, writer: ObjectWriter) -> ObjectInfo:
        """Make the object of its parts, because its bytes are read."""


class Transfers(Protocol):
    """What runs the transfers of parts to the store: `UploadPool`."""

    def run(self, num_bytes: int, job: Callable[[], None]) -> None:
        """Run a transfer of part of an object, now or while the caller goes on."""

    def wait_for_one(self) -> bool:
        """Wait until a transfer has ended; False if none is under way."""

    def settle(self) -> None:
        """Wait until all transfers are done."""


class _Part:
    """A part that is being filled. `tag` is set when it is in the store."""

    __slots__ = ("buffer", "coverage", "is_earlier", "is_full", "lock", "tag")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buffer: PartBuffer | None = None
        self.coverage: Coverage | None = None
        self.tag: UploadedPart | None = None
        self.is_full = self.is_earlier = False


class ObjectWriter:
    """See `OpenObject`. Thread-safe.

    `expected` are the bytes that will be written; all others stay zeros. A part is uploaded as soon
    as its expected bytes are there, except for those that begin before `deferred` bytes, which wait
    for `finish`. What is written to a part that an earlier run has uploaded is dropped: it is
    the same. So are `headers`, bytes by offset that are known from the beginning: whoever writes
    the rest of a part uploads them with it.

    With `transfers`, parts are uploaded and copied there, and are in the store once these are
    settled; else by who completes a part.
    """

    def __init__(
        self,
        path: ObjectPath,
        layout: PartLayout,
        target: PartTarget,
        buffers: PartBuffers,
        expected: Coverage,
        *,
        headers: Sequence[tuple[int, bytes]] = (),
        deferred: int = 0,
        transfers: Transfers | None = None,
    ) -> None:
        self.path, self.layout = path, layout
        self.size = layout.ends[-1] if len(layout) else 0
        self.lock = threading.RLock()
        self.upload_id = ""
        self.completed: ObjectInfo | None = None
        self._target, self._buffers = target, buffers
        self._expected, self._deferred = expected, deferred
        self._headers = headers
        self._header_ends = [offset + len(data) for offset, data in headers]
        self._transfers = transfers
        self._parts = [_Part() for _ in layout.ends]

    def status(self) -> os.stat_result:
        """See `OpenObject`."""
        return to_status(
            self.completed or ObjectInfo(key=self.path.key, size=self.size, version="")
        )

    def truncate(self, num_bytes: int) -> None:
        """Refuse another size."""
        if num_bytes != self.size:
            raise StorageError("an object that is written cannot change its size", file=self.path)

    def close(self) -> None:
        """See `OpenObject`: the object stays under construction."""

    # ---- parts

    def adopt(self, parts: Sequence[UploadedPart]) -> None:
        """Take the parts that an earlier run has uploaded; those of another size do not count."""
        for part in parts:
            if 1 <= part.number <= len(self.layout):
                begin, end = self.layout.bounds(part.number - 1)
                if part.size == end - begin:
                    state = self._parts[part.number - 1]
                    state.tag, state.is_earlier = part, True

    def adopt_object(self, info: ObjectInfo) -> None:
        """Take the whole object, which an earlier run has completed."""
        self.completed = info
        for number, state in enumerate(self._parts):
            begin, end = self.layout.bounds(number)
            state.tag = UploadedPart(number=number + 1, size=end - begin, tag="")
            state.is_earlier = True

    def is_uploaded(self, part: int) -> bool:
        """Whether a part is in the store."""
        return self._parts[part].tag is not None

    @property
    def num_uploaded(self) -> int:
        """The number of parts that are in the store."""
        return sum(part.tag is not None for part in self._parts)

    @property
    def num_adopted(self) -> int:
        """The number of parts that an earlier run has uploaded."""
        return sum(part.is_earlier for part in self._parts)

    def tags(self) -> list[UploadedPart]:
        """All parts, in order.

        Raises:
            StorageError: some are not uploaded.
        """
        tags = [part.tag for part in self._parts if part.tag is not None]
        if len(tags) != len(self._parts):
            raise StorageError(
                f"{len(self._parts) - len(tags)} parts of the object were never written",
                file=self.path,
            )
        return tags

    # ---- writing

    def write(self, data: bytes | Buffer, offset: int) -> None:
        """See `OpenObject`.

        Raises:
            StorageError: the store refused; or bytes of a part that is full are written again.
        """
        view = memoryview(data)  # type: ignore[arg-type]
        if not view.nbytes:
            return
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        if offset + view.nbytes > self.size:
            raise StorageError("bytes behind the end of an object are written", file=self.path)
        for part, begin, end in self.layout.under(offset, view.nbytes):
            self._write_part(part, view[begin - offset : end - offset], begin)

    def _write_part(self, number: int, data: memoryview, offset: int) -> None:
        part = self._parts[number]
        if self._is_known(offset, offset + data.nbytes):
            with part.lock:
                if part.tag is not None or part.is_full:
                    return
                part.is_full = self._is_full(number, self._coverage(part, number))
            if part.is_full:
                self._transfer(number)
            return
        self._target.touch(self, number)
        if part.buffer is None and part.tag is None:
            self._wait_for_memory(number)
        with part.lock:
            if part.tag is not None or part.is_full:
                if part.is_earlier:
                    return
                raise StorageError(
                    f"bytes of part {number + 1} are written again after its upload",
                    file=self.path,
                )
            coverage = self._coverage(part, number)
            begin, _ = self.layout.bounds(number)
            self._buffer(part, number).write(offset - begin, data)
            coverage.add(offset, offset + data.nbytes)
            part.is_full = self._is_full(number, coverage)
            if not part.is_full:
                return
        self._transfer(number)

    def _wait_for_memory(self, number: int) -> None:
        """Wait for parts that are being uploaded, rather than to use the temporary file."""
        begin, end = self.layout.bounds(number)
        while self._transfers is not None and not self._buffers.has_room(end - begin):
            if not self._transfers.wait_for_one():
                return

    def _coverage(self, part: _Part, number: int) -> Coverage:
        """What is written of a part; bytes that nobody will write count as written."""
        if part.coverage is None:
            part.coverage = Coverage()
            begin, end = self.layout.bounds(number)
            for a, b in self._expected.within(begin, end):
                if begin < a:
                    part.coverage.add(begin, a)
                begin = b
            if begin < end:
                part.coverage.add(begin, end)
            for a, b, _ in self._known(number):
                part.coverage.add(a, b)
        return part.coverage

    def _is_known(self, begin: int, end: int) -> bool:
        """Whether some bytes are all of one header."""
        row = bisect_right(self._header_ends, begin)
        return (
            row < len(self._headers)
            and self._headers[row][0] <= begin
            and end <= self._header_ends[row]
        )

    def _known(self, number: int) -> Iterator[tuple[int, int, memoryview]]:
        """The bytes of headers in a part: where they begin and end."""
        begin, end = self.layout.bounds(number)
        for row in range(bisect_right(self._header_ends, begin), len(self._headers)):
            offset, data = self._headers[row]
            if offset >= end:
                return
            a, b = max(begin, offset), min(end, offset + len(data))
            yield a, b, memoryview(data)[a - offset : b - offset]

    def _buffer(self, part: _Part, number: int) -> PartBuffer:
        if part.buffer is None:
            begin, end = self.layout.bounds(number)
            part.buffer = self._buffers.take(end - begin)
            self._clear_gaps(part.buffer, begin, end)
            for a, _, data in self._known(number):
                part.buffer.write(a - begin, data)
            run = self.layout.copies.get(number)
            if run is not None and part.coverage is not None:  # some of it was to be copied
                for a, b in list(part.coverage.within(begin, end)):
                    for data, offset in _read_run(run, a, b):
                        part.buffer.write(offset - begin, data)
        return part.buffer

    def _clear_gaps(self, buffer: PartBuffer, begin: int, end: int) -> None:
        """Write zeros where nobody writes: between the expected bytes of a part."""
        done = begin
        for a, b in [*self._expected.within(begin, end), (end, end)]:
            if done < a:
                buffer.write(done - begin, memoryview(bytes(a - done)))
            done = b

    def _is_full(self, number: int, coverage: Coverage) -> bool:
        begin, end = self.layout.bounds(number)
        return begin >= self._deferred and coverage.holds(begin, end)

    def _transfer(self, number: int) -> None:
        """Upload a part that is full, or let the server copy it."""
        if self._transfers is None:
            self._upload(number)
            return
        begin, end = self.layout.bounds(number)
        num_bytes = min(end - begin, PART_BYTES) if self._parts[number].buffer is None else 0
        self._transfers.run(num_bytes or end - begin, partial(self._upload, number))

    def _upload(self, number: int) -> None:
        part, run = self._parts[number], self.layout.copies.get(number)
        begin, end = self.layout.bounds(number)
        tag = None
        if part.buffer is None and run is not None:
            tag = self._target.copy(self, number, run)
        if tag is None:
            tag = self._target.upload(self, number, self._buffer(part, number).read(0, end - begin))
        with part.lock:
            part.tag, part.coverage = tag, None
            buffer, part.buffer = part.buffer, None
            if buffer is not None:
                buffer.release()
        self._target.uploaded(self, number)

    def copy_from(
        self, source: OpenObject, source_offset: int, offset: int, num_bytes: int
    ) -> bool:
        """See `OpenObject`: the server copies a part once all its bytes were asked for."""
        if not isinstance(source, ReadableObject):
            return False
        under = list(self.layout.under(offset, num_bytes))
        if not any(self._may_copy(part, source, source_offset - offset) for part, _, _ in under):
            return False
        for number, begin, end in under:
            part, is_claimed = self._parts[number], False
            with part.lock:
                is_open = part.tag is None and not part.is_full
                if (
                    is_open
                    and part.buffer is None
                    and self._may_copy(number, source, source_offset - offset)
                ):
                    self._target.touch(self, number)
                    coverage = self._coverage(part, number)
                    coverage.add(begin, end)
                    is_claimed = part.is_full = self._is_full(number, coverage)
                    if not is_claimed:
                        continue
                elif part.is_earlier:
                    self._target.touch(self, number)
                    continue
            if is_claimed:
                self._transfer(number)
                continue
            for start in range(begin, end, _STEP):
                data = np.empty(min(_STEP, end - start), np.uint8)
                source.read_into((data,), source_offset + start - offset)
                self.write(data, start)
        return True

    def _may_copy(self, part: int, source: ReadableObject, shift: int) -> bool:
        run = self.layout.copies.get(part)
        return (
            run is not None
            and run.source == source.path
            and run.source_offset - run.offset == shift
        )

    def finish(self) -> None:
        """Upload the parts that were held back, and those that nobody writes to.

        Raises:
            StorageError: bytes that were expected are missing, or the store refused.
        """
        self._deferred = 0
        for number, part in enumerate(self._parts):
            with part.lock:
                if part.tag is not None:
                    continue
                if not self._is_full(number, self._coverage(part, number)):
                    raise StorageError(
                        f"bytes of part {number + 1} of {len(self._parts)} were never written",
                        file=self.path,
                    )
                part.is_full = True
            self._upload(number)

    # ---- parts that several processes fill

    def export_parts(self) -> list[tuple[int, list[tuple[int, int]], bytes]]:
        """The parts that are filled in part: number, the ranges that are written, their bytes.

        Without bytes the ranges are those of a run that the server is to copy. Parts that are
        under way to the store are not among them.
        """
        out = []
        for number, part in enumerate(self._parts):
            with part.lock:
                if part.tag is not None or part.is_full or part.coverage is None:
                    continue
                begin, end = self.layout.bounds(number)
                expected = Coverage()
                for a, b in self._expected.within(begin, end):
                    expected.add(a, b)
                ranges = [
                    piece
                    for a, b in part.coverage.within(begin, end)
                    for piece in expected.within(a, b)
                ]
                data = b""
                if part.buffer is not None:
                    data = b"".join(bytes(part.buffer.read(a - begin, b - a)) for a, b in ranges)
                if ranges:
                    out.append((number, ranges, data))
        return out

    def import_part(self, number: int, ranges: Sequence[tuple[int, int]], data: bytes) -> None:
        """Add what another process has written to a part: see `export_parts`.

        Raises:
            StorageError: the store refused.
        """
        part, done = self._parts[number], 0
        for a, b in ranges:
            if data:
                self.write(data[done : done + b - a], a)
                done += b - a
                continue
            with part.lock:
                if part.tag is not None or part.is_full:
                    continue
                coverage = self._coverage(part, number)
                coverage.add(a, b)
                part.is_full = is_full = self._is_full(number, coverage)
            if is_full:
                self._transfer(number)

    # ---- reading what is written

    def read_into(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `OpenObject`. Reading bytes that only the store has completes the object."""
        num_bytes = sum(b.nbytes for b in buffers)
        if offset + num_bytes > self.size:
            raise StorageError("bytes behind the end of an object are read", file=self.path)
        data: Any = self._read(offset, num_bytes)
        done = 0
        for buffer in buffers:
            target: Any = np.frombuffer(buffer, np.uint8)
            target[:] = data[done : done + buffer.nbytes]
            done += buffer.nbytes

    def _read(self, offset: int, num_bytes: int) -> Any:
        out = np.zeros(num_bytes, np.uint8)
        for number, begin, end in self.layout.under(offset, num_bytes):
            part = self._parts[number]
            first, _ = self.layout.bounds(number)
            expected = next(self._expected.within(begin, end), None)
            with part.lock:
                if part.buffer is not None and part.coverage is not None:
                    for a, b in part.coverage.within(begin, end):
                        data = part.buffer.read(a - first, b - a)
                        out[a - offset : b - offset] = np.frombuffer(data, np.uint8)
                    continue
            if self._transfers is not None:
                self._transfers.settle()
            if part.tag is None or expected is None:
                for a, b, known in self._known(number):
                    a, b, shift = max(a, begin), min(b, end), a
                    if a < b:
                        out[a - offset : b - offset] = known[a - shift : b - shift]
                continue
            run = self.layout.copies.get(number)
            if self.completed is None and run is not None:
                for piece, start in _read_run(run, begin, end):
                    index = start - offset
                    out[index : index + piece.nbytes] = np.frombuffer(piece, np.uint8)
                continue
            info = self.completed or self._target.complete(self)
            ReadableObject(self.path, info).read_into((out[begin - offset : end - offset],), begin)
        return out


def _read_run(run: CopyRun, begin: int, end: int) -> list[tuple[memoryview, int]]:
    """Bytes of a run from its source, in pieces."""
    opened = ReadableObject(run.source, run_info(run))
    out = []
    for start in range(begin, end, _STEP):
        data = np.empty(min(_STEP, end - start), np.uint8)
        opened.read_into((data,), run.source_offset + start - run.offset)
        out.append((data.data, start))
    return out


def run_info(run: CopyRun) -> ObjectInfo:
    """The source of a run, in the version that it has.

    Raises:
        StorageError: it is gone, or the store refused.
    """
    from megtool.storage.objects.index import store_index

    info = store_index().info(run.source)
    if info is None:
        raise StorageError("the object was removed while it was copied", file=run.source)
    return info
