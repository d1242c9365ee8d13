"""An object of a store as a readable file."""

from __future__ import annotations

import io

from megtool.storage.files import Files
from megtool.storage.location.path import StorePath

_LEAST_BYTES = 64 << 10


class ObjectFile(io.RawIOBase):
    """An object, opened for reading at any position."""

    def __init__(self, path: StorePath) -> None:
        self._files = Files()
        self._fd = self._files.open_read(path)
        self._size = self._files.fstat(self._fd).st_size
        self._position = 0
        self._next, self._ahead = 0, _LEAST_BYTES

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
            self._files.pread_into(self._fd, view, self._position)
            self._position += num_bytes
            self._next = self._position
        return num_bytes

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._files.close(self._fd)
        super().close()
