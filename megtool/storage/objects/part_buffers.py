"""Memory for parts that are being filled; beyond a budget they are in a temporary file."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import IO

from megtool.errors import StorageError

BUDGET_BYTES = 128 << 20
"""What the parts of one run may take in memory."""


class PartBuffers:
    """Buffers, `budget` bytes of them in memory. Thread-safe.

    The temporary file has no name, so nothing is left of it when the process ends.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = BUDGET_BYTES if budget is None else budget
        self.num_bytes = self.peak_bytes = self.spilled_bytes = 0
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def has_room(self, num_bytes: int) -> bool:
        """Whether a buffer of this size would be in memory."""
        return not self.num_bytes or self.num_bytes + num_bytes <= self._budget

    def take(self, num_bytes: int) -> PartBuffer:
        """A buffer, whose bytes may be any until they are written.

        Raises:
            StorageError: there is no space for temporary files.
        """
        with self._lock:
            if self.has_room(num_bytes):
                self.num_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.num_bytes)
                return PartBuffer(self, num_bytes, bytearray(num_bytes), -1)
            slots = self._free.setdefault(num_bytes, [])
            offset = slots.pop() if slots else self._end
            if offset == self._end:
                self._end += num_bytes
            self.spilled_bytes = max(self.spilled_bytes, self._end)
        return PartBuffer(self, num_bytes, None, offset)

    def release(self, buffer: PartBuffer) -> None:
        """Take a buffer back."""
        with self._lock:
            if buffer.offset < 0:
                self.num_bytes -= buffer.num_bytes
            else:
                self._free[buffer.num_bytes].append(buffer.offset)

    def write_file(self, offset: int, data: memoryview) -> None:
        """Write bytes of the temporary file."""
        try:
            with self._lock:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            done = 0
            while done < data.nbytes:
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        except OSError as e:
            raise StorageError(
                f"a temporary file for parts of objects cannot be written: {e.strerror or e}",
                file=tempfile.gettempdir(),
                hint="free some space, or name a larger folder in TMPDIR",
            ) from e

    def read_file(self, offset: int, data: memoryview) -> None:
        """Read bytes of the temporary file."""
        if self._file is None:
            raise RuntimeError("no buffer is in the temporary file")
        done = 0
        while done < data.nbytes:
            step = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if not step:
                raise StorageError("a temporary file for parts of objects was shortened")
            done += step

    def close(self) -> None:
        """Drop the temporary file."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


class PartBuffer:
    """The bytes of one part: `data` in memory, or at `offset` of the temporary file."""

    def __init__(
        self, owner: PartBuffers, num_bytes: int, data: bytearray | None, offset: int
    ) -> None:
        self.num_bytes, self.offset = num_bytes, offset
        self._owner, self._data = owner, data

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`."""
        if self._data is None:
            self._owner.write_file(self.offset + offset, data)
        else:
            self._data[offset : offset + data.nbytes] = data

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes at `offset`."""
        if self._data is not None:
            return memoryview(self._data)[offset : offset + num_bytes]
        out = memoryview(bytearray(num_bytes))
        self._owner.read_file(self.offset + offset, out)
        return out

    def release(self) -> None:
        """End the use of the buffer."""
        self._owner.release(self)
        self._data = None
