"""Ranges of objects of S3 as its clients give them: exact in bytes, and of one version."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from megtool.storage.stores.protocol import ConditionError, truncated
from megtool.storage.stores.s3_errors import is_disconnected


class BrokenReplyError(Exception):
    """A reply to a read that another attempt may cure."""


def first_bytes(result: Any, num_bytes: int) -> memoryview:
    """Return the body of a reply of obstore, of which no more is read than it may have.

    Raises:
        BrokenReplyError: more came.
    """
    data = memoryview(next(iter(result.stream(num_bytes)), b""))
    if data.nbytes > num_bytes:
        raise BrokenReplyError(f"more than {num_bytes:,} bytes came")
    return data


def read_range(
    client: Any, bucket: str, key: str, place: str, offset: int, num_bytes: int, version: str
) -> memoryview:
    """Read a range by a client of boto3.

    Args:
        client: A client that does not retry.
        bucket: The name of the bucket.
        key: The key of the object.
        place: The URL that errors name.
        offset: The first byte.
        num_bytes: The number of bytes, at least 1.
        version: The ETag that the object must have, or "".

    Raises:
        ConditionError: the object has another version.
        FormatError: the object is shorter.
        BrokenReplyError: the reply is not whole.
    """
    from botocore.exceptions import BotoCoreError

    stop = offset + num_bytes
    condition = {"IfMatch": version} if version else {}
    try:
        reply = client.get_object(
            Bucket=bucket, Key=key, Range=f"bytes={offset}-{stop - 1}", **condition
        )
        with contextlib.closing(reply["Body"]) as body:
            data = body.read(num_bytes + 1)
    except BotoCoreError as e:
        if is_disconnected(e) or "Incomplete" in type(e).__name__:
            raise BrokenReplyError(first_line(str(e))) from e
        raise
    if version and reply.get("ETag", version) != version:
        raise ConditionError("the object has another version", file=place)
    shown = re.fullmatch(
        r"bytes ([0-9]{1,20})-([0-9]{1,20})/([0-9]{1,20})", str(reply.get("ContentRange", ""))
    )
    if shown is not None and int(shown[3]) < stop:
        raise truncated(place, int(shown[3]), stop)
    is_asked = shown is not None and (int(shown[1]), int(shown[2])) == (offset, stop - 1)
    if not is_asked or len(data) != num_bytes:
        raise BrokenReplyError(f"{len(data):,} of {num_bytes:,} bytes came")
    return memoryview(data)


def first_line(text: str) -> str:
    """Return the first lines of an error of a client, as one, without its own place in the code."""
    return " ".join(text.partition("\n\nDebug source")[0].split())[:200]
