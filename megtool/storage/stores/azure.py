"""Azure Blob Storage: block blobs, whose blocks are the parts of an upload."""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from megtool.errors import FormatError, MissingPackageError, StorageError
from megtool.storage.stores.protocol import (
    SEND_TIMEOUT,
    UPLOAD_METADATA,
    BucketMissingError,
    BucketUrl,
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    Upload,
    UploadedPart,
    truncated,
)
from megtool.storage.stores.reply_limits import (
    ListingLimit,
    OversizeReplyError,
    make_bounded_session,
    odd_reply,
    refuse_oversize,
    to_size,
    to_text,
)
from megtool.storage.stores.schemes import missing_package

T = TypeVar("T")

_HINT = (
    "AZURE_STORAGE_CONNECTION_STRING; or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, "
    "AZURE_STORAGE_SAS_TOKEN, or `az login` and the package azure-identity"
)
_ID = re.compile(r"([0-9a-f]{16})-(\d{5})")
_UPLOAD = UPLOAD_METADATA.replace("-", "_")
"""The service takes names of metadata without hyphens only."""

_LIST = 5000


class AzureStore(BucketUrl):
    """See `Store`; `url` is `az://CONTAINER`. The account is that of the environment.

    The blocks of an upload carry its id in theirs. Block 0, of one byte, says that it has begun.
    The service drops blocks that are not committed after a week.
    """

    can_write = True
    can_copy = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        name = url.partition("://")[2]
        self._container: Any = _service(url).get_container_client(name)

    # ---- errors

    def _call(self, key: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the SDK; its errors become megtool's."""
        from azure.core.exceptions import AzureError

        try:
            return call(*arguments, **named)
        except AzureError as e:
            self._raise(e, key)
        except OversizeReplyError as e:
            raise refuse_oversize(e, self._place(key)) from None
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as e:
            raise odd_reply(self._place(key), str(e)[:200] or type(e).__name__) from e

    def _raise(self, error: Exception, key: str) -> NoReturn:
        from azure.core import exceptions as x

        place = self._place(key)
        status = getattr(error, "status_code", None)
        code = getattr(error, "error_code", None)
        code = str(getattr(code, "value", code) or "")
        if isinstance(error, x.ResourceExistsError | x.ResourceModifiedError) or status == 412:
            raise ConditionError(
                "the object exists already, or has another version", file=place
            ) from None
        if code == "ContainerNotFound":
            raise BucketMissingError(
                "there is no container of this name",
                file=place,
                hint="check the name and the account: az://CONTAINER/PREFIX",
            ) from None
        if isinstance(error, x.ResourceNotFoundError):
            raise ObjectMissingError("there is no such object", file=place) from None
        if isinstance(error, x.ClientAuthenticationError) or status in (401, 403):
            raise _refusal(code, place) from None
        if status in (429, 503):
            raise StorageError(
                f"the store was overloaded: {code or status}",
                file=place,
                hint="run the command again later: it resumes",
                error_id="throttled",
            ) from None
        if isinstance(error, x.ServiceRequestError | x.ServiceResponseError):
            raise StorageError(
                f"the store cannot be reached ({type(error).__name__})",
                file=place,
                hint="check the account name, the network and HTTPS_PROXY",
            ) from None
        raise StorageError(
            f"the store answered {code or type(error).__name__} (HTTP {status})", file=place
        ) from None

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        try:
            entries = self._call(key, self._container.get_blob_client(key).get_blob_properties)
        except BucketMissingError:
            raise
        except ObjectMissingError:
            return None
        return _info(entries, self._place(key))

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        start = f"{prefix}/" if prefix else ""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []

        place = self._place(prefix)
        limit = ListingLimit(place)

        def collect() -> None:
            if recursive:
                entries = self._container.list_blobs(name_starts_with=start, results_per_page=_LIST)
            else:
                entries = self._container.walk_blobs(name_starts_with=start, delimiter="/")
            for item in entries:
                limit.add(1)
                if item.name.endswith("/"):
                    if item.name != start and not recursive:
                        prefixes.append(item.name.rstrip("/"))
                elif (item.metadata or {}).get("hdi_isfolder") != "true":
                    objects.append(_info(item, place))
                if most is not None and len(objects) + len(prefixes) >= most:
                    return

        self._call(prefix, collect)
        return Listing(objects=tuple(objects), prefixes=tuple(dict.fromkeys(prefixes)))

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if num_bytes == 0:
            return memoryview(b"")
        from azure.core.exceptions import HttpResponseError

        blob = self._container.get_blob_client(key)

        def download() -> bytes:
            try:
                data: bytes = blob.download_blob(
                    offset, num_bytes, max_concurrency=1, **_condition(version)
                ).readall()
            except HttpResponseError as e:
                if e.status_code == 416:
                    raise self._truncated(key, offset + num_bytes) from None
                raise
            return data

        data = self._call(key, download)
        if len(data) != num_bytes:
            raise self._truncated(key, offset + num_bytes)
        return memoryview(data)

    def _truncated(self, key: str, stop: int) -> FormatError:
        info = self.head(key)
        return truncated(self._place(key), info.size if info else 0, stop)

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """See `Store.put`."""
        blob = self._container.get_blob_client(key)
        if version and self.head(key) is None:
            raise ConditionError("the object is gone", file=self._place(key))
        reply = self._call(
            key,
            blob.upload_blob,
            bytes(data),
            overwrite=not create,
            max_concurrency=1,
            **_condition(version),
        )
        size = memoryview(data).nbytes
        return ObjectInfo(key=key, size=size, version=_tag(reply["etag"]))

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        for key in keys:
            try:
                self._call(key, self._container.delete_blob, key)
            except BucketMissingError:
                raise
            except ObjectMissingError:
                continue

    # ---- objects in parts

    def begin_upload(self, key: str) -> str:
        """See `Store.begin_upload`."""
        upload_id = secrets.token_hex(8)
        blob = self._container.get_blob_client(key)
        self._call(key, blob.stage_block, _block_id(upload_id, 0), b"\0")
        return upload_id

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        body = bytes(data)
        block_id = _block_id(upload_id, number)
        blob = self._container.get_blob_client(key)
        self._call(key, blob.stage_block, block_id, body, length=len(body))
        return UploadedPart(number=number, size=len(body), tag=block_id)

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """Refused: the service would need a signed URL of the source."""
        raise StorageError("ranges are not copied inside this store", file=self._place(key))

    def _blocks(self, key: str) -> Sequence[tuple[str, UploadedPart]]:
        """The uncommitted blocks of a blob, each with the upload that it belongs to."""
        blob = self._container.get_blob_client(key)
        try:
            _, blocks = self._call(key, blob.get_block_list, "uncommitted")
        except BucketMissingError:
            raise
        except ObjectMissingError:
            return []
        out = []
        for block in blocks:
            match = _parse_block_id(str(block.id))
            if match is not None:
                part = UploadedPart(
                    number=match[1], size=block.size, tag=_block_id(match[0], match[1])
                )
                out.append((match[0], part))
        return out

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """See `Store.list_parts`."""
        parts = [part for upload, part in self._blocks(key) if upload == upload_id]
        if not parts:
            raise ObjectMissingError("there is no such upload in parts", file=self._place(key))
        return sorted((p for p in parts if p.number), key=lambda part: part.number)

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """See `Store.list_uploads`; of objects that exist already, none is listed."""
        start = f"{prefix}/" if prefix else ""

        def collect() -> Sequence[Any]:
            entries = self._container.list_blobs(
                name_starts_with=start, include=["uncommittedblobs"]
            )
            return [item for item in entries if not item.etag or not item.size]

        uploads: dict[tuple[str, str], Upload] = {}
        for item in self._call(prefix, collect):
            for upload_id, _ in self._blocks(item.name):
                started_ns = _ns(getattr(item, "creation_time", None) or item.last_modified)
                uploads[item.name, upload_id] = Upload(
                    key=item.name, upload_id=upload_id, started_ns=started_ns
                )
        return list(uploads.values())

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        from azure.storage.blob import BlobBlock

        if create and self.head(key) is not None:
            raise ConditionError("the object exists already", file=self._place(key))
        stored = {part.tag: part for part in self.list_parts(key, upload_id)}
        for part in parts:
            if stored.get(part.tag) != part:
                raise StorageError(
                    f"part {part.number} is not what was uploaded", file=self._place(key)
                )
        blob = self._container.get_blob_client(key)
        reply = self._call(
            key,
            blob.commit_block_list,
            [BlobBlock(block_id=part.tag) for part in parts],
            metadata={_UPLOAD: upload_id},
            **(_absent() if create else {}),
        )
        size = sum(part.size for part in parts)
        return ObjectInfo(key=key, size=size, version=_tag(reply["etag"]))

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """See `Store.is_made_of`: the object names the upload."""
        blob = self._container.get_blob_client(info.key)
        try:
            properties = self._call(info.key, blob.get_blob_properties, **_condition(info.version))
        except (ConditionError, ObjectMissingError):
            return False
        return bool((properties.metadata or {}).get(_UPLOAD) == upload_id)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`.

        Blocks are dropped with those of all uploads of the key: by an empty blob, which is deleted
        at once. If the object exists, they stay until the service drops them.
        """
        if not any(upload == upload_id for upload, _ in self._blocks(key)):
            return
        blob = self._container.get_blob_client(key)
        try:
            reply = self._call(key, blob.commit_block_list, [], **_absent())
        except ConditionError:
            return
        self._call(key, blob.delete_blob, **_condition(_tag(reply["etag"])))


def _service(url: str) -> Any:
    """The client of the account that the environment names.

    Raises:
        MissingPackageError: azure-storage-blob or azure-identity is not installed.
        StorageError: the environment names no account.
    """
    try:
        from azure.core.pipeline.transport import RequestsTransport
        from azure.storage.blob import BlobServiceClient
    except ImportError as e:
        raise missing_package("azure-storage-blob", url) from e
    settings: dict[str, Any] = {
        "transport": RequestsTransport(session=make_bounded_session(), session_owner=False),
        "retry_total": 7,
        "connection_timeout": SEND_TIMEOUT,
        "read_timeout": 120,
        "max_single_put_size": 256 << 20,
        "max_single_get_size": 1 << 30,
        "max_chunk_get_size": 64 << 20,
    }
    env = os.environ.get
    try:
        if text := env("AZURE_STORAGE_CONNECTION_STRING"):
            return BlobServiceClient.from_connection_string(text, **settings)
        account = env("AZURE_STORAGE_ACCOUNT") or env("AZURE_STORAGE_ACCOUNT_NAME")
        if not account:
            raise StorageError(
                "the environment names no account of Azure",
                file=url,
                hint=_HINT,
                error_id="no-credentials",
            )
        endpoint = env("AZURE_STORAGE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
        return BlobServiceClient(endpoint, credential=_credential(url, account), **settings)
    except (ValueError, binascii.Error):
        raise StorageError(
            "a setting of Azure is no use", file=url, hint=_HINT, error_id="no-credentials"
        ) from None


def _credential(url: str, account: str) -> Any:
    env = os.environ.get
    if key := env("AZURE_STORAGE_KEY") or env("AZURE_STORAGE_ACCOUNT_KEY"):
        from azure.core.credentials import AzureNamedKeyCredential

        return AzureNamedKeyCredential(account, key)
    if token := env("AZURE_STORAGE_SAS_TOKEN"):
        from azure.core.credentials import AzureSasCredential

        return AzureSasCredential(token.lstrip("?"))
    if env("AZURE_SKIP_SIGNATURE", "").lower() == "true":
        return None
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as e:
        raise MissingPackageError(
            "azure-identity is not installed, and the environment has no key and no SAS token",
            file=url,
            hint="pip install azure-identity, or " + _HINT,
        ) from e
    return DefaultAzureCredential()


def _refusal(code: str, place: str) -> StorageError:
    if code in ("AuthorizationPermissionMismatch", "InsufficientAccountPermissions"):
        return StorageError(
            "the store denies access with these credentials",
            file=place,
            hint="reading needs the role Storage Blob Data Reader, writing Contributor",
            error_id="permission-denied",
        )
    what = f" ({code})" if code else ""
    return StorageError(
        f"the store does not accept the credentials{what}",
        file=place,
        hint=f"check the account, the key and the clock of this machine; {_HINT}",
        error_id="no-credentials",
    )


def _condition(version: str) -> dict[str, Any]:
    if not version:
        return {}
    from azure.core import MatchConditions

    return {"etag": version, "match_condition": MatchConditions.IfNotModified}


def _absent() -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"match_condition": MatchConditions.IfMissing}


def _block_id(upload_id: str, number: int) -> str:
    return f"{upload_id}-{number:05}"


def _parse_block_id(text: str) -> tuple[str, int] | None:
    """The upload and the number in the id of a block, which the SDK gives decoded or not."""
    match = _ID.fullmatch(text)
    if match is None:
        try:
            match = _ID.fullmatch(base64.b64decode(text, validate=True).decode("ascii"))
        except ValueError:
            return None
    return None if match is None else (match[1], int(match[2]))


def _tag(etag: str) -> str:
    return etag if etag.startswith('"') else f'"{etag}"'


def _ns(time_: Any) -> int:
    return 0 if time_ is None else round(time_.timestamp() * 10**9)


def _info(item: Any, place: str) -> ObjectInfo:
    return ObjectInfo(
        key=to_text(item.name, "name", place),
        size=to_size(item.size, place),
        version=_tag(to_text(item.etag, "ETag", place, max_length=1024)),
        modified_ns=_ns(item.last_modified),
    )
