"""Small objects: read whole, and under construction whole in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megtool.errors import StorageError
from megtool.storage.objects.index import to_status
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.open_objects import Buffer, OpenObject
from megtool.storage.stores.protocol import ObjectInfo, ObjectMissingError, truncated


class SmallObject:
    """See `OpenObject`: all bytes are known, and are only read."""

    def __init__(self, path: ObjectPath, data: bytes) -> None:
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


def read_object(path: ObjectPath, info: ObjectInfo | None = None) -> bytes | None:
    """All bytes of a small object, which is looked up unless `info` is given; None without one.

    Raises:
        StorageError: the store refused.
    """
    info = info or path.store.head(path.key)
    if info is None:
        return None
    try:
        return bytes(path.store.read(path.key, 0, info.size))
    except ObjectMissingError:
        return None


def read_json(path: ObjectPath, info: ObjectInfo | None = None) -> dict[str, Any]:
    """A small object of JSON, see `read_object`; empty if it is missing or damaged.

    Raises:
        StorageError: the store refused.
    """
    try:
        values = json.loads(read_object(path, info) or b"")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
