"""Google Cloud Storage through its JSON API; objects in parts are composed by the server."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from megtool.errors import StorageError
from megtool.storage.stores.http_client import HttpClient, HttpReply, error_of
from megtool.storage.stores.protocol import (
    UPLOAD_METADATA,
    BucketMissingError,
    BucketUrl,
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    Upload,
    UploadedPart,
)
from megtool.storage.stores.reply_limits import ListingLimit, odd_reply, to_size, to_text
from megtool.storage.stores.schemes import missing_package

PARTS_FOLDER = ".megtool-parts"
"""Beside an object that is written in parts: `FOLDER/.megtool-parts/NAME/UPLOAD/NUMBER`."""

_COMPOSE = 32
"""The most objects that one request composes (the limit of the service)."""

_BEGIN = "begin"

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_HINT = (
    "`gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS, or the service "
    "account of the machine"
)


class GcsStore(BucketUrl):
    """See `Store`; `url` is `gs://BUCKET`. Versions are generations.

    An upload in parts is a folder of objects, one per part, which the service composes into one
    object, create-only if that is asked for. So parts outlive the process that wrote them, and any
    other can list them. Listings leave these folders out.
    """

    can_write = True
    can_copy = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._bucket = url.partition("://")[2]
        host = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if host and "://" not in host:
            host = f"http://{host}"
        self._host = host.rstrip("/") or "https://storage.googleapis.com"
        is_open = bool(host) or os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() == "true"
        self._client = HttpClient(url, authorize=dict if is_open else _token_headers(url))

    # ---- requests

    def _object_url(self, key: str) -> str:
        return f"{self._host}/storage/v1/b/{self._bucket}/o/{quote(key, safe='')}"

    def _send(
        self,
        method: str,
        url: str,
        key: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | memoryview | None = None,
        is_repeatable: bool = True,
    ) -> HttpReply:
        reply = self._client.send(
            method,
            url,
            self._place(key),
            params=params,
            headers=headers,
            data=data,
            is_repeatable=is_repeatable,
        )
        if reply.status >= 300:
            raise self._error_of(reply, key)
        return reply

    def _error_of(self, reply: HttpReply, key: str, stop: int = 0) -> Exception:
        error = reply.json()
        inner = error.get("error", {}) if isinstance(error, dict) else {}
        text = str(inner.get("message", "")) if isinstance(inner, dict) else ""
        place = self._place(key)
        if reply.status == 401:
            return StorageError(
                "the store does not accept the credentials",
                file=place,
                hint=_HINT,
                error_id="no-credentials",
            )
        if reply.status == 403:
            return StorageError(
                "the store denies access with these credentials",
                file=place,
                hint="reading needs roles/storage.objectViewer, writing roles/storage.objectUser",
                error_id="permission-denied",
            )
        # Of an object, Google says "No such object: BUCKET/KEY".
        if reply.status == 404 and text.lower().startswith("the specified bucket"):
            return BucketMissingError(
                "there is no bucket of this name", file=place, hint="check the name"
            )
        return error_of(reply, place, stop)

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        try:
            return self._info(self._send("GET", self._object_url(key), key).json(), key)
        except BucketMissingError:
            raise
        except ObjectMissingError:
            return None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for page in self._pages(prefix, recursive=recursive):
            for item in page.get("items", ()):
                if not item["name"].endswith("/") and f"/{PARTS_FOLDER}/" not in f"/{item['name']}":
                    objects.append(self._info(item, prefix))
            folders = (p.rstrip("/") for p in page.get("prefixes", ()))
            prefixes += [p for p in folders if p.rpartition("/")[2] != PARTS_FOLDER]
            if most is not None and len(objects) + len(prefixes) >= most:
                break
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def _info(self, item: Any, key: str) -> ObjectInfo:
        """Return an object as a reply describes it, each field checked."""
        place = self._place(key)
        if not isinstance(item, dict):
            raise odd_reply(place, "it is no description of an object")
        modified_ns = 0
        updated = item.get("updated")
        if isinstance(updated, str):
            with contextlib.suppress(ValueError, OverflowError):
                seconds = datetime.fromisoformat(updated.replace("Z", "+00:00")).timestamp()
                modified_ns = round(seconds * 10**9)
        return ObjectInfo(
            key=to_text(item.get("name"), "name", place),
            size=to_size(item.get("size"), place),
            version=to_text(str(item.get("generation", "")), "generation", place, max_length=64),
            modified_ns=modified_ns,
        )

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        params = {"prefix": f"{prefix}/" if prefix else "", "maxResults": "1000"}
        if not recursive:
            params["delimiter"] = "/"
        url = f"{self._host}/storage/v1/b/{self._bucket}/o"
        place = self._place(prefix)
        limit = ListingLimit(place)
        while True:
            page = self._send("GET", url, prefix, params=params).json()
            _check_page(page, place)
            yield page
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = to_text(page["nextPageToken"], "token of the next page", place)
            limit.add(len(page.get("items", ())), params["pageToken"])

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        params = {"alt": "media"}
        if version:
            params["ifGenerationMatch"] = version

        def check(reply: HttpReply) -> None:
            generation = reply.headers.get("x-goog-generation")
            if version and generation is not None and generation != version:
                raise ConditionError("the object has another version", file=self._place(key))
            if reply.status in (401, 403, 404):
                raise self._error_of(reply, key)

        if num_bytes == 0:
            return memoryview(b"")
        return self._client.read_range(
            self._object_url(key), self._place(key), offset, num_bytes, params=params, check=check
        )

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """See `Store.put`."""
        params = {"uploadType": "media", "name": key}
        if create or version:
            params["ifGenerationMatch"] = "0" if create else version
        reply = self._send(
            "POST",
            f"{self._host}/upload/storage/v1/b/{self._bucket}/o",
            key,
            params=params,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            is_repeatable=not (create or version),
        )
        return self._info(reply.json(), key)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        for key in keys:
            try:
                self._send("DELETE", self._object_url(key), key)
            except BucketMissingError:
                raise
            except ObjectMissingError:
                continue

    # ---- objects in parts

    def _parts_prefix(self, key: str, upload_id: str) -> str:
        folder, slash, name = key.rpartition("/")
        return f"{folder}{slash}{PARTS_FOLDER}/{name}/{upload_id}"

    def begin_upload(self, key: str) -> str:
        """See `Store.begin_upload`."""
        upload_id = secrets.token_hex(8)
        self.put(f"{self._parts_prefix(key, upload_id)}/{_BEGIN}", b"begin")
        return upload_id

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        info = self.put(f"{self._parts_prefix(key, upload_id)}/{number:05}", data)
        return UploadedPart(number=number, size=info.size, tag=info.version)

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """Refused: the service copies whole objects only."""
        raise StorageError("the store does not copy ranges of objects", file=self._place(key))

    def _upload_objects(self, key: str, upload_id: str) -> Sequence[ObjectInfo]:
        prefix = self._parts_prefix(key, upload_id)
        pages = self._pages(prefix, recursive=True)
        objects = [self._info(item, key) for page in pages for item in page.get("items", ())]
        if not any(info.key == f"{prefix}/{_BEGIN}" for info in objects):
            raise ObjectMissingError("there is no such upload in parts", file=self._place(key))
        return objects

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """See `Store.list_parts`."""
        numbered = (
            (info.key.rpartition("/")[2], info) for info in self._upload_objects(key, upload_id)
        )
        return [
            UploadedPart(number=int(name), size=info.size, tag=info.version)
            for name, info in sorted(numbered, key=lambda pair: pair[0])
            if name.isdigit()
        ]

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        uploads: list[Upload] = []
        for page in self._pages(prefix, recursive=True):
            for item in page.get("items", ()):
                names = item["name"].split("/")
                if len(names) < 4 or names[-1] != _BEGIN or names[-4] != PARTS_FOLDER:
                    continue
                key = "/".join([*names[:-4], names[-3]])
                started_ns = self._info(item, prefix).modified_ns
                uploads.append(Upload(key=key, upload_id=names[-2], started_ns=started_ns))
        return uploads

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        prefix = self._parts_prefix(key, upload_id)
        stored = {part.number: part for part in self.list_parts(key, upload_id)}
        for part in parts:
            if stored.get(part.number) != part:
                raise StorageError(
                    f"part {part.number} is not what was uploaded", file=self._place(key)
                )
        if create and self.head(key) is not None:
            raise ConditionError("the object exists already", file=self._place(key))
        pieces = [(f"{prefix}/{part.number:05}", part.tag) for part in parts]
        level = 0
        while len(pieces) > _COMPOSE:
            level += 1
            pieces = [
                self._join(f"{prefix}/join-{level}-{n:05}", pieces[n : n + _COMPOSE])
                for n in range(0, len(pieces), _COMPOSE)
            ]
        info = self._compose(key, pieces, upload_id=upload_id, create=create)
        if info.size != sum(part.size for part in parts):
            raise StorageError(
                f"the store composed {info.size:,} bytes of {sum(part.size for part in parts):,}",
                file=self._place(key),
            )
        self.abort_upload(key, upload_id)
        return info

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """See `Store.is_made_of`: the object names the upload."""
        params = {"ifGenerationMatch": info.version}
        try:
            item = self._send("GET", self._object_url(info.key), info.key, params=params).json()
        except (ConditionError, ObjectMissingError):
            return False
        return bool((item.get("metadata") or {}).get(UPLOAD_METADATA) == upload_id)

    def _join(self, key: str, pieces: Sequence[tuple[str, str]]) -> tuple[str, str]:
        info = self._compose(key, pieces)
        return info.key, info.version

    def _compose(
        self,
        key: str,
        pieces: Sequence[tuple[str, str]],
        *,
        upload_id: str = "",
        create: bool = False,
    ) -> ObjectInfo:
        import json

        if not pieces:
            return self.put(key, b"", create=create)
        body = {
            "destination": {
                "contentType": "application/octet-stream",
                **({"metadata": {UPLOAD_METADATA: upload_id}} if upload_id else {}),
            },
            "sourceObjects": [
                {"name": name, "generation": generation} for name, generation in pieces
            ],
        }
        reply = self._send(
            "POST",
            f"{self._object_url(key)}/compose",
            key,
            params={"ifGenerationMatch": "0"} if create else None,
            headers={"Content-Type": "application/json"},
            data=json.dumps(body).encode(),
            is_repeatable=not create,
        )
        return self._info(reply.json(), key)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`."""
        try:
            objects = self._upload_objects(key, upload_id)
        except ObjectMissingError:
            return
        # The object that says that there is an upload goes last: a clean that is cut goes on.
        last = [info.key for info in objects if info.key.endswith(f"/{_BEGIN}")]
        self.delete([info.key for info in objects if info.key not in last] + last)


def _token_headers(url: str) -> Callable[[], Mapping[str, str]]:
    """What makes headers with a token of the application's default credentials.

    Raises:
        MissingPackageError: google-auth is not installed.
        StorageError: there are no credentials.
    """
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests
    except ImportError as e:
        raise missing_package("google-auth", url) from e
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except google.auth.exceptions.GoogleAuthError:
        raise StorageError(
            "there are no credentials for Google Cloud Storage",
            file=url,
            hint=f"{_HINT}; GOOGLE_SKIP_SIGNATURE=true reads a public bucket without any",
            error_id="no-credentials",
        ) from None
    request = google.auth.transport.requests.Request()
    lock = threading.Lock()

    def headers() -> Mapping[str, str]:
        out: dict[str, str] = {}
        with lock:
            try:
                credentials.before_request(request, "GET", url, out)
            except google.auth.exceptions.GoogleAuthError as e:
                raise StorageError(
                    f"the credentials cannot be renewed ({type(e).__name__})",
                    file=url,
                    hint=_HINT,
                    error_id="no-credentials",
                ) from None
        return {name: value for name, value in out.items() if isinstance(value, str)}

    return headers


def _check_page(page: Any, place: str) -> None:
    """Raise if a page of a listing has no objects with names, or prefixes that are no text."""
    items: Any = page.get("items", []) if isinstance(page, dict) else None
    prefixes: Any = page.get("prefixes", []) if isinstance(page, dict) else None
    is_page = isinstance(items, list) and isinstance(prefixes, list)
    if not is_page or not all(isinstance(item, dict) for item in items):
        raise odd_reply(place, "it is no page of a listing")
    for name in (*(item.get("name") for item in items), *prefixes):
        to_text(name, "name", place)
