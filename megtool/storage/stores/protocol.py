"""What an object store can do: the seam behind which S3, GCS, Azure, HTTP and memory are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megtool.errors import FormatError, StorageError

MIN_PART_BYTES = 5 << 20
"""The least size of a part that is not the last (the limit of S3)."""

MAX_PARTS = 10_000
"""The most parts of an object (the limit of S3)."""

MAX_PART_BYTES = 5 << 30
"""The most bytes of a part (the limit of S3)."""

UPLOAD_METADATA = "megtool-upload"
"""The name of the metadata by which an object says of which upload it was made."""

SEND_TIMEOUT = 60
"""Seconds to connect, and to send one body: clients by urllib3 bound both by the same time.

A part of 8 MiB then needs 140 KiB a second.
"""


class ConditionError(StorageError):
    """A conditional request failed: the object exists already, or has another version."""

    default_id = "condition-failed"


class ObjectMissingError(StorageError):
    """There is no such object, upload or bucket."""

    default_id = "object-missing"


class BucketMissingError(ObjectMissingError):
    """There is no such bucket, container or repository, so nothing is known of its objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object: its key, size in bytes, version (an ETag or a generation), and time of writing.

    The version is empty where a store has none, and then changes of the object are not noticed.
    What `head` returns has a time of writing; only stores that nothing is written to may leave out
    even that.
    """

    key: str
    size: int
    version: str
    modified_ns: int = 0


def by_key(info: ObjectInfo) -> str:
    """Return what objects are sorted by."""
    return info.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Objects directly below a prefix, and the prefixes one level down, without their slash."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPart:
    """A part of an upload: its number from 1, size, and the tag with which it is completed."""

    number: int
    size: int
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload that is neither completed nor aborted.

    Uploads may have two ids: `begin_upload` returns the long one, and `upload_id` here is the
    store's own, which the long one ends with. `list_parts` and `abort_upload` take both,
    `is_made_of` only the long one.
    """

    key: str
    upload_id: str
    started_ns: int = 0


class BucketUrl:
    """The URL of a bucket, and those of objects in it: the beginning of every store."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _place(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url


class Store(Protocol):
    """One bucket. Thread-safe. Keys have no slash at their beginning or end.

    Every method raises `StorageError`, with the URL, for what the store refuses: a missing bucket
    (`BucketMissingError`, where the store can tell), missing permission, expired credentials, a
    wrong region, or a failure that retries do not cure.
    A conditional request whose reply was lost is repeated only where its own success can be told
    from what another program wrote; else it is an error, and the caller reads back.
    """

    @property
    def url(self) -> str:
        """The URL of the bucket, without credentials."""

    @property
    def can_write(self) -> bool:
        """Whether objects can be written."""

    @property
    def can_copy(self) -> bool:
        """Whether `copy_part` works: the server copies ranges between its objects."""

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """The object of this key; None if there is none."""

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """The objects below a folder (`prefix` without slash; empty: the bucket).

        Objects are sorted by key. Keys that end in a slash, with which some tools mark folders, are
        left out. `recursive` lists all depths, and no prefixes. `most` stops after about as many.
        """

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """Bytes of an object.

        Raises:
            ConditionError: it has another version than `version`.
            ObjectMissingError: there is none.
            FormatError: it is shorter.
        """

    # ---- whole objects

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        """Write a whole object; `create`: only if there is none; `version`: only if it has that.

        Leases need both conditions: a store without them is unsafe.

        Raises:
            ConditionError: the condition does not hold.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""

    # ---- objects in parts

    def begin_upload(self, key: str) -> str:
        """Begin an upload in parts; the object appears when it is completed.

        Returns the long id, see `Upload`.
        """

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """Upload a part; a part of the same number is replaced."""

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """Let the server copy bytes of an object of this bucket into a part.

        Raises:
            ConditionError: the source has another version.
        """

    def list_parts(self, key: str, upload_id: str) -> Sequence[UploadedPart]:
        """The parts that an upload has, by number.

        Raises:
            ObjectMissingError: there is no such upload: it is completed or aborted.
        """

    def list_uploads(self, prefix: str) -> Sequence[Upload]:
        """The uploads that are under way below a prefix."""

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """Make the object of its parts; `create`: only if there is none of this key.

        Raises:
            ConditionError: there is one.
            ObjectMissingError: there is no such upload.
        """

    def is_made_of(self, info: ObjectInfo, upload_id: str) -> bool:
        """Whether an object is what an upload in parts has become, and no other's of its size.

        It takes the long id. Objects name their upload as metadata: `UPLOAD_METADATA`.
        """

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; a missing one is no error."""


def truncated(
    file: str | Path | None, end: int | None, expected: int, *, hint: str | None = None
) -> FormatError:
    """The error of a file or an object that ends at byte `end` (or None), before `expected`."""
    where = "" if end is None else f"ends at byte {end:,}, "
    return FormatError(
        f"truncated: {where}{expected:,} expected", file=file, hint=hint, error_id="truncated-file"
    )
