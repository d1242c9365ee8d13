"""An object of a store as a readable file."""

from __future__ import annotations

import io

from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.open_objects import open_objects

_LEAST_BYTES = 64 << 10


class ObjectFile(io.RawIOBase):
    """An object, opened for reading at any position; also one under construction.

    Raises:
        StorageError: it is missing, or the store refused.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._number = open_objects().open_read(path)
        self._opened = open_objects()[self._number]
        self._size = self._opened.status().st_size
        self._position = 0
        self._next, self._ahead = 0, _LEAST_BYTES

    def read_whole(self) -> bytes:
        """Read all bytes at once."""
        data = bytearray(self._size)
        self._opened.read_into((memoryview(data),), 0)
        return bytes(data)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read up to the size of a buffer; less at first, twice as much when reading goes on."""
        if self._position == self._next:
            self._ahead *= 2
        elif self._position:
            self._ahead = _LEAST_BYTES
        num_bytes = max(0, min(len(buffer), self._ahead, self._size - self._position))
        if num_bytes:
            view = memoryview(buffer).cast("B")[:num_bytes]
            self._opened.read_into((view,), self._position)
            self._position += num_bytes
            self._next = self._position
        return num_bytes

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            open_objects().close(self._number)
        super().close()
