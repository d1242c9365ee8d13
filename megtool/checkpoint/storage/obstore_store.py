"""Stores through obstore: Google Cloud Storage, Azure, HTTP, and the reading of S3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megtool.checkpoint.storage.store import (
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    Upload,
    UploadedPart,
)
from megtool.errors import FormatError, MissingPackageError, StorageError

_RETRIES = {"max_retries": 8}


def open_obstore(url: str) -> ObstoreStore:
    """The store of a bucket of GCS or Azure, or of an HTTP server.

    Raises:
        MissingPackageError: obstore is not installed.
        StorageError: the settings from the environment are no use.
    """
    return ObstoreStore(url)


class ObstoreStore:
    """See `Store`; reads, lists and whole objects of every store that obstore knows.

    `options` are settings of obstore that the environment does not hold.
    """

    can_copy = False

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self.can_write = not url.startswith("http")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as e:
            raise MissingPackageError(
                "obstore is not installed", file=url, hint="pip install 'megtool[stores]'"
            ) from e
        self._obstore = obstore
        is_plain = url.startswith("http://")
        settings: dict[str, Any] = dict(options or {})
        if is_plain:
            settings["client_options"] = {"allow_http": True}
        try:
            self._store: Any = from_url(url, **settings)
        except obstore.exceptions.BaseError as e:
            self._raise(e, "")

    # ---- errors

    def _place(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _raise(self, error: Exception, key: str) -> NoReturn:
        """Raise obstore's error as one of megtool's, in one sentence."""
        x = self._obstore.exceptions
        place = self._place(key)
        text = describe(error)
        if isinstance(error, x.AlreadyExistsError | x.PreconditionError | x.NotModifiedError):
            raise ConditionError("the object exists already, or was changed", file=place) from error
        if isinstance(error, x.NotFoundError | FileNotFoundError):
            raise ObjectMissingError(
                "there is no such bucket or object",
                file=place,
                hint="check the name, and the endpoint and region of the environment",
            ) from error
        if "Range request not supported" in text:
            raise StorageError(
                "the server ignores ranges: it sends whole objects",
                file=place,
                hint="copy the object to a disk or to a store that heeds ranges",
            ) from error
        if "status code: 416" in text:  # the range begins behind the object's end
            raise FormatError(
                "truncated: it ends before the bytes that are read",
                file=place,
                error_id="truncated-file",
            ) from error
        if isinstance(error, x.PermissionDeniedError | x.UnauthenticatedError | PermissionError):
            raise StorageError(
                f"the store refuses access: {text}",
                file=place,
                hint="check the credentials in the environment or the profile, and their rights",
                error_id="permission-denied",
            ) from error
        raise StorageError(f"the store failed: {text}", file=place) from error

    def _info(self, meta: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            key=meta["path"],
            size=meta["size"],
            version=meta.get("e_tag") or meta.get("version") or "",
            modified_ns=int(meta["last_modified"].timestamp() * 10**9),
        )

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        try:
            return self._info(self._store.head(key))
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            return None
        except (self._obstore.exceptions.BaseError, OSError) as e:
            self._raise(e, key)

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        if self.url.startswith("http"):
            return Listing(objects=())  # a web server lists no folders
        start = f"{prefix}/" if prefix else None
        try:
            if not recursive:
                found = self._store.list_with_delimiter(start)
                return Listing(
                    objects=tuple(self._info(m) for m in found["objects"]),
                    prefixes=tuple(found["common_prefixes"]),
                )
            objects: list[ObjectInfo] = []
            for batch in self._store.list(start):
                objects += [self._info(m) for m in batch]
                if most is not None and len(objects) >= most:
                    break
            return Listing(objects=tuple(objects))
        except (self._obstore.exceptions.BaseError, OSError) as e:
            self._raise(e, prefix)

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if not num_bytes:
            return memoryview(b"")
        options: dict[str, Any] = {"range": (offset, offset + num_bytes)}
        if version.startswith('"'):
            options["if_match"] = version
        try:
            result = self._store.get(key, options=options)
            if tuple(result.range) != (offset, offset + num_bytes):
                raise FormatError(
                    f"truncated: ends at byte {result.meta['size']:,}, "
                    f"{offset + num_bytes:,} expected",
                    file=self._place(key),
                    error_id="truncated-file",
                )
            return memoryview(result.bytes())
        except (self._obstore.exceptions.BaseError, OSError) as e:
            self._raise(e, key)

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """See `Store.put`."""
        mode: Any = "create" if create else {"e_tag": version} if version else "overwrite"
        try:
            done = self._store.put(key, data, mode=mode, use_multipart=False)
        except (self._obstore.exceptions.BaseError, OSError) as e:
            self._raise(e, key)
        return ObjectInfo(key=key, size=memoryview(data).nbytes, version=done["e_tag"] or "")

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        try:
            self._store.delete(list(keys))
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])
        except (self._obstore.exceptions.BaseError, OSError) as e:
            self._raise(e, keys[0] if keys else "")

    # ---- objects in parts

    def _refuse(self) -> NoReturn:
        raise StorageError("objects in parts are not written to this store", file=self.url)

    def begin_upload(self, key: str) -> str:
        """See `Store.begin_upload`."""
        self._refuse()

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        self._refuse()

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
        self._refuse()

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """See `Store.list_parts`."""
        self._refuse()

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        return ()

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        self._refuse()

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`."""


def describe(error: Exception) -> str:
    """The first sentence of an error of obstore, without what it prints for debugging."""
    text = str(error).partition("\n\nDebug source")[0].strip().replace("\n", " ")
    return re.sub(r"\s+", " ", text)[:300]
