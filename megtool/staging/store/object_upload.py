"""An object that is written on its own, without a stage: it appears, or replaces another, whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from megtool.errors import StorageError
from megtool.staging.publication import complete_once, put_once
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.open_objects import open_objects
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.objects.part_layout import CopyRun, Coverage, cut_parts
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ObjectInfo, UploadedPart

_CHUNK_BYTES = 8 << 20


def write_file(source: Path, fd: int, files: Files) -> None:
    """Write all of a local file to an open one."""
    offset = 0
    with source.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            files.pwrite_all(fd, data, offset)
            offset += len(data)


def upload_object(
    path: StorePath, num_bytes: int, write: Callable[[int], None], files: Files
) -> None:
    """Upload an object of `num_bytes`, which `write` fills, given the open file.

    Raises:
        StorageError: bytes are missing, or the store refused; nothing is left of the upload.
    """
    buffers = PartBuffers()
    upload = ObjectUpload(path, num_bytes, buffers)
    try:
        fd = files.open_write(path)
        try:
            write(fd)
        finally:
            files.close(fd)
        upload.finish()
        upload.close()
    except BaseException:
        with contextlib.suppress(StorageError):
            upload.abort()
        raise
    finally:
        buffers.close()
    files.refresh(path)


class ObjectUpload:
    """An object of `num_bytes` under construction, which `Files` opens for writing by its path.

    All its bytes are written, at any offset and in any order. `finish` uploads the last parts, and
    `close` lets the object appear; `abort` drops what is uploaded. With `create` it replaces none.
    """

    def __init__(
        self, path: StorePath, num_bytes: int, buffers: PartBuffers, *, create: bool = False
    ) -> None:
        expected = Coverage()
        if num_bytes:
            expected.add(0, num_bytes)
        self._writer = ObjectWriter(path, cut_parts(num_bytes), self, buffers, expected)
        self._path, self._store, self._create = path, path.store, create
        open_objects().construct(path, self._writer)

    def finish(self) -> None:
        """Upload the parts that are not uploaded yet.

        Raises:
            StorageError: bytes are missing, or the store refused.
        """
        self._writer.finish()

    def abort(self) -> None:
        """Drop what is uploaded, unless the object has appeared.

        Raises:
            StorageError: the store refused.
        """
        open_objects().construct(self._path, None)
        if self._writer.upload_id and self._writer.completed is None:
            self._store.abort_upload(self._path.key, self._writer.upload_id)

    def close(self) -> None:
        """Let the object appear, and forget that it was under construction.

        Raises:
            StorageError: the store refused.
        """
        self.complete(self._writer)
        open_objects().construct(self._path, None)

    # ---- the parts

    def touch(self, writer: ObjectWriter, part: int) -> None:
        """See `PartTarget`."""

    def upload(self, writer: ObjectWriter, part: int, data: memoryview) -> UploadedPart:
        with writer.lock:
            if not writer.upload_id:
                writer.upload_id = self._store.begin_upload(writer.path.key)
        return self._store.upload_part(writer.path.key, writer.upload_id, part + 1, data)

    def copy(self, writer: ObjectWriter, part: int, run: CopyRun) -> UploadedPart | None:
        """See `PartTarget`: nothing is copied."""
        return None

    def uploaded(self, writer: ObjectWriter, part: int) -> None:
        """See `PartTarget`."""

    def complete(self, writer: ObjectWriter) -> ObjectInfo:
        if writer.completed is None:
            if not len(writer.layout):
                put = put_once if self._create else _put
                writer.completed = put(writer.path, b"")
            else:
                writer.completed = complete_once(
                    writer.path, writer.upload_id, writer.tags(), is_safe=self._create
                )
        return writer.completed


def _put(path: ObjectPath, data: bytes) -> ObjectInfo:
    return path.store.put(path.key, data)
