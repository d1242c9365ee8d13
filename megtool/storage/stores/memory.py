"""An object store in memory, with the semantics of S3: versions, conditions, uploads in parts."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megtool.errors import StorageError
from megtool.storage.stores.protocol import (
    MIN_PART_BYTES,
    BucketUrl,
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    Upload,
    UploadedPart,
    truncated,
)


@dataclass(slots=True)
class _Upload:
    key: str
    started_ns: int
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryStore(BucketUrl):
    """See `Store`. `min_part_bytes` is the least size of a part that is not the last."""

    can_write = True
    can_copy = True

    def __init__(self, url: str, *, min_part_bytes: int = MIN_PART_BYTES) -> None:
        super().__init__(url)
        self._min_part_bytes = min_part_bytes
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._upload_of: dict[str, str] = {}  # versions of uploaded objects, and the uploads
        self._lock = threading.RLock()
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        with self._lock:
            entry = self._objects.get(key)
            return entry[0] if entry else None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        start = f"{prefix}/" if prefix else ""
        objects: list[ObjectInfo] = []
        prefixes: dict[str, None] = {}
        with self._lock:
            for key in sorted(self._objects):
                if not key.startswith(start):
                    continue
                if most is not None and len(objects) + len(prefixes) >= most:
                    break
                head, slash, _ = key[len(start) :].partition("/")
                if slash and not recursive:
                    prefixes[start + head] = None
                else:
                    objects.append(self._objects[key][0])
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        with self._lock:
            entry = self._objects.get(key)
        if entry is None:
            raise ObjectMissingError("there is no such object", file=self._place(key))
        if version and entry[0].version != version:
            raise ConditionError("the object has another version", file=self._place(key))
        if offset + num_bytes > len(entry[1]):
            raise truncated(self._place(key), len(entry[1]), offset + num_bytes)
        return memoryview(entry[1])[offset : offset + num_bytes]

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """See `Store.put`."""
        with self._lock:
            entry = self._objects.get(key)
            if create and entry is not None:
                raise ConditionError("the object exists already", file=self._place(key))
            if version and (entry is None or entry[0].version != version):
                raise ConditionError("the object has another version", file=self._place(key))
            return self._store(key, bytes(data))

    def _store(self, key: str, data: bytes) -> ObjectInfo:
        info = ObjectInfo(
            key=key, size=len(data), version=f'"{self._next()}"', modified_ns=time.time_ns()
        )
        self._objects[key] = info, data
        return info

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    # ---- objects in parts

    def begin_upload(self, key: str) -> str:
        """See `Store.begin_upload`."""
        with self._lock:
            upload_id = f"upload-{self._next()}"
            self._uploads[upload_id] = _Upload(key, time.time_ns())
            return upload_id

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise ObjectMissingError("there is no such upload", file=self._place(key))
        return upload

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        content = bytes(data)
        with self._lock:
            self._upload(key, upload_id).parts[number] = content
        return _part(number, content)

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """See `Store.copy_part`."""
        data = self.read(source.key, offset, num_bytes, version=source.version)
        return self.upload_part(key, upload_id, number, data)

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """See `Store.list_parts`."""
        with self._lock:
            parts = self._upload(key, upload_id).parts
            return [_part(number, parts[number]) for number in sorted(parts)]

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            return [
                Upload(key=u.key, upload_id=upload_id, started_ns=u.started_ns)
                for upload_id, u in self._uploads.items()
                if u.key.startswith(start)
            ]

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        with self._lock:
            upload = self._upload(key, upload_id)
            if create and key in self._objects:
                raise ConditionError("the object exists already", file=self._place(key))
            chosen = []
            for part in parts:
                data = upload.parts.get(part.number)
                if data is None or _part(part.number, data).tag != part.tag:
                    raise StorageError(
                        f"part {part.number} is not what was uploaded", file=self._place(key)
                    )
                chosen.append(data)
            if any(len(data) < self._min_part_bytes for data in chosen[:-1]):
                raise StorageError("a part is too small", file=self._place(key))
            del self._uploads[upload_id]
            info = self._store(key, b"".join(chosen))
            self._upload_of[info.version] = upload_id
            return info

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """See `Store.is_made_of`."""
        with self._lock:
            return self._upload_of.get(info.version) == upload_id

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`."""
        with self._lock:
            self._uploads.pop(upload_id, None)


def _part(number: int, data: bytes) -> UploadedPart:
    tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    return UploadedPart(number=number, size=len(data), tag=tag)
