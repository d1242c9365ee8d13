"""S3 and what speaks like it: data through obstore, control and copies on the server by boto3."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from awscrt.checksums import crc32c

from megtool.errors import StorageError
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
    by_key,
    truncated,
)
from megtool.storage.stores.reply_limits import ListingLimit, odd_reply, to_size, to_text
from megtool.storage.stores.retries import pause
from megtool.storage.stores.s3_client import open_s3
from megtool.storage.stores.s3_errors import (
    MISSING_CODES,
    S3Reply,
    client_error,
    error_of,
    is_lost,
    reply_in,
    reply_of,
)
from megtool.storage.stores.s3_range import BrokenReplyError, first_bytes, first_line, read_range
from megtool.storage.stores.s3_upload import (
    as_body,
    join_ids,
    name_of,
    new_name,
    quoted_tag,
    store_id_of,
)

T = TypeVar("T")

_DAMAGED = {
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
}

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What boto3 raises beside its own errors for replies whose fields are not those of S3."""

_PAGE = 1000
_MULTI_DELETE = 4
"""More objects than this are deleted by one request."""


class S3Store(BucketUrl):
    """See `Store`; `url` is `s3://BUCKET`.

    Requests that may be repeated are, with growing pauses: those that read, and those that write
    the same bytes to the same place without a condition. One with a condition is repeated only if
    the server said that it did not carry it out.
    """

    can_write = True
    can_copy = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._bucket = url.partition("://")[2]
        clients = open_s3(self._bucket, url)
        self._client = clients.retrying
        self._single = clients.single
        self._objects = clients.objects
        self._attempts = clients.attempts
        self._needs_checksum = clients.needs_checksum
        self._has_exposed_token = clients.has_exposed_token
        self._has_bucket = False  # not known yet

    # ---- errors

    @contextlib.contextmanager
    def _client_errors(self, key: str) -> Iterator[None]:
        """Raise what boto3 fails with as errors of megtool; the store's refusals pass."""
        from botocore.exceptions import BotoCoreError
        from botocore.parsers import ResponseParserError

        try:
            yield
        except BotoCoreError as e:
            raise client_error(e, self._place(key)) from e
        except (ResponseParserError, *_UNREADABLE) as e:
            raise odd_reply(self._place(key), first_line(str(e)) or type(e).__name__) from e

    def _call(
        self, key: str, call: Callable[..., Any], *, field: str = "", **arguments: Any
    ) -> Any:
        """Call a method of a client of boto3; its errors become megtool's.

        `field` is in every whole reply: boto3 takes a reply that broke off before its first byte
        for one without content.
        """
        from botocore.exceptions import ClientError

        for attempt in range(self._attempts):
            try:
                with self._client_errors(key):
                    reply = call(Bucket=self._bucket, **arguments)
                self._has_bucket = True
                if not field or reply.get(field) not in (None, {}):
                    return reply
            except ClientError as e:
                reply = reply_of(e)
                # What was sent changed on the way.
                if reply.code not in _DAMAGED or attempt == self._attempts - 1:
                    self._raise(reply, key, e)
            pause(attempt)
        raise StorageError(
            f"the store sent {self._attempts} replies without content", file=self._place(key)
        )

    def _call_once(self, key: str, call: Callable[..., T], **arguments: Any) -> T:
        """Call what may not be carried out twice: only a refusal for load is tried again."""
        from botocore.exceptions import ClientError

        for attempt in range(self._attempts):
            try:
                with self._client_errors(key):
                    return call(Bucket=self._bucket, **arguments)
            except ClientError as e:
                reply = reply_of(e)
                is_busy = reply.is_throttle or reply.code == "ConditionalRequestConflict"
                if not is_busy or attempt == self._attempts - 1:
                    self._raise(reply, key, e)
            pause(attempt)
        raise AssertionError("unreachable")

    def _repeat(self, call: Callable[[bool], T]) -> T:
        """Call again while it is not known what became of a request; `call` gets whether it is."""
        for attempt in range(self._attempts - 1):
            try:
                return call(attempt > 0)
            except StorageError as e:
                if not is_lost(e):
                    raise
            pause(attempt)
        return call(True)

    def _raise(self, reply: S3Reply, key: str, error: Exception) -> NoReturn:
        raise error_of(reply, self._place(key), attempts=self._attempts) from error

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        from botocore.exceptions import ClientError

        try:
            with self._client_errors(key):
                reply = self._client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as e:
            answer = reply_of(e)
            if answer.code in MISSING_CODES:
                self._check_bucket(key)
                return None
            self._explain(key)
            self._raise(answer, key, e)
        return self._listed(
            {**reply, "Key": key, "Size": reply.get("ContentLength")}, self._place(key)
        )

    def _listed(self, item: Mapping[str, Any], place: str) -> ObjectInfo:
        """Return an object as a reply lists it, each field checked."""
        return ObjectInfo(
            key=to_text(item.get("Key"), "key", place),
            size=to_size(item.get("Size"), place),
            version=to_text(item.get("ETag"), "ETag", place, max_length=1024),
            modified_ns=_to_ns(item.get("LastModified")),
        )

    def _explain(self, key: str) -> None:
        """Raise what the store says of an object: a reply to HEAD has no body that says why."""
        reply = self._call(key, self._single.get_object, Key=key, Range="bytes=0-0")
        reply["Body"].close()

    def _check_bucket(self, key: str) -> None:
        """Raise if the bucket is missing, which a reply to HEAD does not say; asked once."""
        if self._has_bucket:
            return
        try:
            reply = self._call(key, self._client.get_object, Key=key, Range="bytes=0-0")
            reply["Body"].close()
        except BucketMissingError:
            raise
        except ObjectMissingError:
            self._has_bucket = True

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        start = f"{prefix}/" if prefix else ""
        arguments: dict[str, Any] = {"Prefix": start}
        if not recursive:
            arguments["Delimiter"] = "/"
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        place = self._place(prefix)
        limit = ListingLimit(place)
        while True:
            left = _PAGE if most is None else most - len(objects) - len(prefixes)
            if left <= 0:
                break
            arguments["MaxKeys"] = min(_PAGE, left + 1)  # one may be the marker of the folder
            page = self._call(
                prefix, self._client.list_objects_v2, field="IsTruncated", **arguments
            )
            for item in page.get("Contents", ()):
                info = self._listed(item, place)
                if not info.key.startswith(start):
                    raise odd_reply(place, f"it lists the key {info.key[:40]!r}")
                if not info.key.endswith("/"):  # the marker of a folder, made by some tools
                    objects.append(info)
            for item in page.get("CommonPrefixes", ()):
                prefixes.append(to_text(item.get("Prefix"), "prefix", place).rstrip("/"))
            if not page.get("IsTruncated"):
                break
            token = to_text(page.get("NextContinuationToken"), "token of the next page", place)
            limit.add(len(page.get("Contents", ())) + len(page.get("CommonPrefixes", ())), token)
            arguments["ContinuationToken"] = token
        objects.sort(key=by_key)  # SeaweedFS goes through folders: `a/c` is before `a-b`
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if num_bytes == 0:
            return memoryview(b"")
        options: dict[str, Any] = {"range": (offset, offset + num_bytes)}
        if version:
            options["if_match"] = version
        for attempt in range(self._attempts):
            try:
                if self._has_exposed_token:
                    return self._read_by_client(key, offset, num_bytes, version)
                return self._read_once(key, options, offset, num_bytes)
            except BrokenReplyError as e:
                if attempt == self._attempts - 1:
                    raise StorageError(
                        f"the store broke off {self._attempts} times: {e}",
                        file=self._place(key),
                        hint="run the command again: it resumes",
                    ) from e
            pause(attempt)
        raise AssertionError("unreachable")

    def _read_once(
        self, key: str, options: dict[str, Any], offset: int, num_bytes: int
    ) -> memoryview:
        from obstore import exceptions as x

        stop = offset + num_bytes
        try:
            result = self._objects.get(key, options=options)
            size = result.meta["size"]
            tag = result.meta.get("e_tag")
            if "if_match" in options and tag is not None and tag != options["if_match"]:
                raise ConditionError("the object has another version", file=self._place(key))
            if tuple(result.range) == (offset, stop):
                data = first_bytes(result, num_bytes)
            else:
                data = memoryview(b"")
        except (x.PreconditionError, x.NotModifiedError) as e:
            raise ConditionError("the object has another version", file=self._place(key)) from e
        except (x.NotFoundError, FileNotFoundError) as e:
            reply = reply_in(str(e)) or S3Reply(code="NoSuchKey", status=404)
            self._raise(reply, key, e)
        except (x.BaseError, OSError, TimeoutError) as e:
            whole = self._read_whole(key, options, num_bytes) if _is_not_partial(e) else None
            if offset or whole is None:
                self._raise_read(e, key, stop)
            return whole
        if stop > size:
            raise truncated(self._place(key), size, stop)
        if tuple(result.range) != (offset, stop):
            raise BrokenReplyError(f"asked for bytes {offset:,} to {stop:,}, got {result.range}")
        if len(data) != num_bytes:
            raise BrokenReplyError(f"{len(data):,} of {num_bytes:,} bytes came")
        return data

    def _read_whole(self, key: str, options: dict[str, Any], size: int) -> memoryview | None:
        """An object of `size` bytes; None if it has another size.

        `rclone serve s3` answers a range that is the whole object as if none had been asked for.
        """
        from obstore import exceptions as x

        others = {name: value for name, value in options.items() if name != "range"}
        try:
            result = self._objects.get(key, options=others)
            return first_bytes(result, size) if result.meta["size"] == size else None
        except (x.BaseError, OSError, TimeoutError) as e:
            raise BrokenReplyError(first_line(str(e))) from e

    def _read_by_client(self, key: str, offset: int, num_bytes: int, version: str) -> memoryview:
        """Read a range by boto3, which follows no redirect to another host."""
        from botocore.exceptions import ClientError

        place, stop = self._place(key), offset + num_bytes
        try:
            with self._client_errors(key):
                return read_range(
                    self._single, self._bucket, key, place, offset, num_bytes, version
                )
        except ClientError as e:
            answer = reply_of(e)
            if answer.status == 416 or answer.code == "InvalidRange":
                info = self.head(key)
                raise truncated(place, info.size if info else 0, stop) from e
            if answer.status >= 500 and not answer.is_throttle:
                raise BrokenReplyError(f"{answer.code} (HTTP {answer.status})") from e
            self._raise(answer, key, e)

    def _raise_read(self, error: Exception, key: str, stop: int) -> NoReturn:
        text = str(error)
        if _is_not_partial(error):
            raise StorageError(
                "the store ignores ranges: it sends the whole object",
                file=self._place(key),
                hint="checkpoints are read in ranges; use another gateway to the store",
                error_id="ranges-ignored",
            ) from error
        reply = reply_in(text)
        if "redirect without LOCATION" in text:
            self._explain(key)
            reply = S3Reply(code="PermanentRedirect", status=301)
        if reply is None:
            raise BrokenReplyError(first_line(text)) from error
        if reply.status == 416 or reply.code == "InvalidRange":
            info = self.head(key)
            raise truncated(self._place(key), info.size if info else 0, stop) from error
        if reply.status >= 500 and not reply.is_throttle:
            raise BrokenReplyError(f"{reply.code} (HTTP {reply.status})") from error
        self._raise(reply, key, error)

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """See `Store.put`."""
        body = bytes(data)
        if create or version:
            condition = {"IfNoneMatch": "*"} if create else {"IfMatch": version}
            return self._repeat(lambda is_repeated: self._put_if(key, body, condition, is_repeated))
        reply = self._call(key, self._client.put_object, Key=key, Body=body, **self._checksum(body))
        return _info(key, len(body), reply["ETag"], None)

    def _put_if(
        self, key: str, body: bytes, condition: dict[str, str], is_repeated: bool
    ) -> ObjectInfo:
        """Put an object under a condition, or find there this one, if the request is repeated."""
        try:
            reply = self._call_once(
                key,
                self._single.put_object,
                Key=key,
                Body=body,
                **self._checksum(body),
                **condition,
            )
        except ObjectMissingError as e:
            if "IfMatch" in condition and e.id == "object-missing" and self.head(key) is None:
                raise ConditionError("the object is gone", file=self._place(key)) from e
            raise
        except ConditionError:
            info = self.head(key) if is_repeated else None
            if info is None or info.size != len(body):
                raise
            if self.read(key, 0, info.size, version=info.version) != body:
                raise
            return info
        return _info(key, len(body), reply["ETag"], None)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store.delete`."""
        if len(keys) <= _MULTI_DELETE:
            for key in keys:
                self._call(key, self._client.delete_object, Key=key)
            return
        for start in range(0, len(keys), _PAGE):
            batch = keys[start : start + _PAGE]
            try:
                reply = self._call(
                    batch[0],
                    self._client.delete_objects,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            except ObjectMissingError:
                raise
            except StorageError:
                # Stores without this request, or with another idea of its checksum.
                left = list(batch)
            else:
                left = [e["Key"] for e in reply.get("Errors", ()) if e["Code"] != "NoSuchKey"]
            for key in left:
                self._call(key, self._client.delete_object, Key=key)

    def _checksum(self, body: bytes | bytearray) -> dict[str, str]:
        """The CRC-32C of what is sent, which the store compares, where TLS does not do it."""
        if not self._needs_checksum:
            return {}
        return {"ChecksumCRC32C": base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()}

    # ---- objects in parts

    def begin_upload(self, key: str) -> str:
        """See `Store.begin_upload`.

        The id begins with a name, which the object that is made of the upload will have.
        """
        name = new_name()
        reply = self._call(
            key,
            self._client.create_multipart_upload,
            field="UploadId",
            Key=key,
            Metadata={UPLOAD_METADATA: name},
        )
        return join_ids(name, reply["UploadId"])

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        body = as_body(data)
        reply = self._call(
            key,
            self._client.upload_part,
            Key=key,
            UploadId=store_id_of(upload_id),
            PartNumber=number,
            Body=body,
            **self._checksum(body),
        )
        return UploadedPart(number=number, size=len(body), tag=quoted_tag(reply["ETag"]))

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
        reply = self._call(
            source.key,
            self._client.upload_part_copy,
            field="CopyPartResult",
            Key=key,
            UploadId=store_id_of(upload_id),
            PartNumber=number,
            CopySource={"Bucket": self._bucket, "Key": source.key},
            CopySourceRange=f"bytes={offset}-{offset + num_bytes - 1}",
            CopySourceIfMatch=source.version,
        )
        tag = quoted_tag(reply["CopyPartResult"]["ETag"])
        return UploadedPart(number=number, size=num_bytes, tag=tag)

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """See `Store.list_parts`."""
        arguments: dict[str, Any] = {"Key": key, "UploadId": store_id_of(upload_id)}
        newest: dict[int, tuple[Any, UploadedPart | None]] = {}
        place = self._place(key)
        limit = ListingLimit(place)
        while True:
            page = self._call(key, self._client.list_parts, field="IsTruncated", **arguments)
            for item in page.get("Parts", ()):
                number = to_size(item.get("PartNumber"), place)
                time_ = _to_ns(item.get("LastModified"))
                tag = quoted_tag(to_text(item.get("ETag"), "ETag", place, max_length=1024))
                part = UploadedPart(number=number, size=to_size(item.get("Size"), place), tag=tag)
                before, other = newest.get(number, (None, None))
                # SeaweedFS lists a replaced part beside the one that replaced it. Of two of one
                # second, none is listed: then it is uploaded again.
                if before is None or time_ > before:
                    newest[number] = time_, part
                elif time_ == before and part != other:
                    newest[number] = time_, None
            if not page.get("IsTruncated"):
                return [part for _, (_, part) in sorted(newest.items()) if part is not None]
            arguments["PartNumberMarker"] = to_size(page.get("NextPartNumberMarker"), place)
            limit.add(len(page.get("Parts", ())), arguments["PartNumberMarker"])

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """See `Store.list_uploads`."""
        arguments: dict[str, Any] = {"Prefix": f"{prefix}/" if prefix else ""}
        uploads: list[Upload] = []
        place = self._place(prefix)
        limit = ListingLimit(place)
        while True:
            page = self._call(
                prefix, self._client.list_multipart_uploads, field="IsTruncated", **arguments
            )
            uploads += [
                Upload(
                    key=to_text(u.get("Key"), "key", place),
                    upload_id=to_text(u.get("UploadId"), "upload id", place),
                    started_ns=_to_ns(u.get("Initiated")),
                )
                for u in page.get("Uploads", ())
            ]
            if not page.get("IsTruncated"):
                return uploads
            arguments["KeyMarker"] = page.get("NextKeyMarker") or ""
            arguments["UploadIdMarker"] = page.get("NextUploadIdMarker") or ""
            limit.add(
                len(page.get("Uploads", ())), (arguments["KeyMarker"], arguments["UploadIdMarker"])
            )

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        chosen = [{"PartNumber": part.number, "ETag": part.tag} for part in parts]
        size = sum(part.size for part in parts)
        reply = self._repeat(
            lambda _: self._call_once(
                key,
                self._single.complete_multipart_upload,
                Key=key,
                UploadId=store_id_of(upload_id),
                MultipartUpload={"Parts": chosen},
                **({"IfNoneMatch": "*"} if create else {}),
            )
        )
        if "ETag" in reply:
            return _info(key, size, reply["ETag"], None)
        info = self.head(key)  # the reply broke off before its content
        if info is None or info.size != size:
            raise StorageError("the upload was not completed", file=self._place(key))
        return info

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """See `Store.is_made_of`: the object has the name of the upload."""
        from botocore.exceptions import ClientError

        try:
            with self._client_errors(info.key):
                reply = self._client.head_object(
                    Bucket=self._bucket, Key=info.key, IfMatch=info.version
                )
        except ClientError as e:
            answer = reply_of(e)
            if answer.code in MISSING_CODES:
                self._check_bucket(info.key)
                return False
            if answer.status == 412:
                return False
            self._explain(info.key)
            self._raise(answer, info.key, e)
        name = name_of(upload_id)
        return bool(name and reply.get("Metadata", {}).get(UPLOAD_METADATA) == name)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`."""
        with contextlib.suppress(ObjectMissingError):
            self._call(
                key, self._client.abort_multipart_upload, Key=key, UploadId=store_id_of(upload_id)
            )


def _info(key: str, size: int, version: str, modified: Any) -> ObjectInfo:
    return ObjectInfo(key=key, size=size, version=version, modified_ns=_to_ns(modified))


def _to_ns(time_: Any) -> int:
    try:
        return 0 if time_ is None else round(time_.timestamp() * 10**9)
    except (OverflowError, ValueError, OSError):
        return 0


def _is_not_partial(error: Exception) -> bool:
    """Whether a range was asked for, and the whole object came."""
    return any(word in str(error) for word in ("non-partial", "Non-partial", "NotPartial"))
