"""A small object under construction, whole in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.errors import StorageError
from megtool.storage.location.index import to_status
from megtool.storage.location.path import StorePath
from megtool.storage.objects.open_objects import OpenObject
from megtool.storage.stores.protocol import ObjectInfo, truncated

if TYPE_CHECKING:
    from megtool.storage.objects.transfer import Buffer


class SmallObject:
    """See `OpenObject`: all bytes are known, and are only read."""

    def __init__(self, path: StorePath, data: bytes) -> None:
        self.path, self._data = path, data
        self.info = ObjectInfo(key=path.key, size=len(data), version="")

    def status(self) -> os.stat_result:
        """See `OpenObject`."""
        return to_status(self.info)

    def read_into(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See `OpenObject`.

        Raises:
            FormatError: the object is shorter.
        """
        num_bytes = sum(b.nbytes for b in buffers)
        if offset + num_bytes > len(self._data):
            raise truncated(self.path, len(self._data), offset + num_bytes)
        data = np.frombuffer(self._data, np.uint8)
        for buffer in buffers:
            target: Any = np.frombuffer(buffer, np.uint8)
            target[:] = data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def write(self, data: bytes | Buffer, offset: int) -> None:
        """Refuse: it is written whole."""
        raise StorageError("a small object is written whole", file=self.path)

    def truncate(self, num_bytes: int) -> None:
        """Refuse: it is written whole."""
        raise StorageError("a small object is written whole", file=self.path)

    def copy_from(
        self, source: OpenObject, source_offset: int, offset: int, num_bytes: int
    ) -> bool:
        """False: it is written whole."""
        return False

    def close(self) -> None:
        """See `OpenObject`."""
