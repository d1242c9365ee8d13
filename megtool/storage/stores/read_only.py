"""What stores that are only read have in common: they refuse to write, each in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megtool.errors import DestinationError, StorageError
from megtool.storage.stores.protocol import BucketUrl, ObjectInfo, Store, Upload, UploadedPart
from megtool.storage.stores.schemes import writable_places


def require_writable(store: Store, destination: Path) -> None:
    """Refuse a destination in a store that is only read, without a request.

    Raises:
        DestinationError: it is.
    """
    if not store.can_write:
        raise DestinationError(
            "this kind of store is only read",
            file=destination,
            hint=f"write to {writable_places()}",
            error_id="destination-not-writable",
        )


class ReadOnlyStore(BucketUrl):
    """The part of `Store` that writes, refused. `url` is that of the bucket."""

    can_write = False
    can_copy = False
    write_hint = f"write to {writable_places()}"

    def _refuse(self, key: str = "") -> NoReturn:
        scheme = self.url.partition("://")[0]
        raise StorageError(
            f"nothing is written to {scheme}://",
            file=self._place(key),
            hint=self.write_hint,
            error_id="permission-denied",
        )

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """Refused."""
        self._refuse(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Refused."""
        self._refuse(keys[0] if keys else "")

    def begin_upload(self, key: str) -> str:
        """Refused."""
        self._refuse(key)

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """Refused."""
        self._refuse(key)

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """Refused."""
        self._refuse(key)

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """Refused."""
        self._refuse(key)

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """None: nothing is written."""
        return ()

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """Refused."""
        self._refuse(key)

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """False: nothing is written."""
        return False

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Refused."""
        self._refuse(key)
