"""Limits on what a remote may answer: bytes and time of a reply, pages of a listing."""

from __future__ import annotations

import http.client
import io
import socket
import time
import zlib
from typing import Any

from megtool.errors import StorageError

MAX_BODY_BYTES = 32 << 20
"""The most bytes of a page, a listing or a document that a store answers with."""

MAX_ERROR_BYTES = 64 << 10
"""Bytes that are read of what a store says beside an error."""

MAX_OBJECT_BYTES = 1 << 60
"""The largest size of an object that is believed."""

MAX_LISTED = 1_000_000
"""The most objects of one listing."""

MAX_DEPTH = 32
"""The most folders below each other in one listing."""

_LISTING_SECONDS = 600.0
_HEADER_SECONDS = 60.0
_LEAST_BYTES_PER_SECOND = 8 << 10
"""A body may take a minute, and a second for each so many bytes."""

_CHUNK = 256 << 10


class SlowReplyError(OSError):
    """A reply that comes too slowly to end in time."""


class OversizeReplyError(Exception):
    """A reply with more bytes than its kind may have."""


class ListingLimit:
    """A count of what a listing holds, which raises for one that has no end.

    A token that comes back means that pages repeat.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._tokens: set[object] = set()
        self._num_objects = 0
        self._stop = time.monotonic() + _LISTING_SECONDS

    def add(self, num_objects: int, token: object = None) -> None:
        """Count the objects of a page; `token` names the next one.

        Raises:
            StorageError: the listing repeats, or is longer than `MAX_LISTED` or ten minutes.
        """
        self._num_objects += num_objects
        if token is not None and (token in self._tokens or len(self._tokens) > MAX_LISTED):
            self._refuse("the listing repeats itself without end")
        self._tokens.add(token)
        if self._num_objects > MAX_LISTED:
            self._refuse(f"the listing has more than {MAX_LISTED:,} objects")
        if time.monotonic() > self._stop:
            self._refuse(f"the listing takes more than {_LISTING_SECONDS:.0f} s")

    def _refuse(self, message: str) -> None:
        raise StorageError(message, file=self._place, hint="give a folder further down")


def odd_reply(place: str, what: str) -> StorageError:
    """Return the error for a reply whose fields are not those of its protocol."""
    return StorageError(
        f"the store's reply is not understood: {what}",
        file=place,
        hint="check the endpoint: something else than a store may answer there",
    )


def to_size(value: object, place: str) -> int:
    """Return the size of an object that a reply names, as a number or in digits.

    Raises:
        StorageError: it is no number, negative, or larger than any object.
    """
    text = str(value)
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= MAX_OBJECT_BYTES:
        return int(text)
    raise odd_reply(place, f"the size is {text[:40]!r}")


def to_text(value: object, what: str, place: str, *, max_length: int = 4096) -> str:
    """Return a key, version or token that a reply names.

    Raises:
        StorageError: it is no text, empty, or longer than `max_length`.
    """
    if isinstance(value, str) and 0 < len(value) <= max_length and "\0" not in value:
        return value
    raise odd_reply(place, f"the {what} is {str(value)[:40]!r}")


def read_body(raw: Any, encoding: str, max_bytes: int) -> bytes:
    """Read the body of a reply of urllib3, decompressed, to its end.

    Raises:
        OversizeReplyError: there are more than `max_bytes`, as sent or decompressed.
    """
    out = bytearray()
    inflate = None
    if encoding.lower() in ("gzip", "x-gzip", "deflate"):
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
    while True:
        data = raw.read(_CHUNK, decode_content=False)
        if not data:
            return bytes(out)
        try:
            out += inflate.decompress(data, max_bytes + 1 - len(out)) if inflate else data
        except zlib.error as e:
            raise OversizeReplyError("its compressed bytes are damaged") from e
        if len(out) > max_bytes or (inflate is not None and inflate.unconsumed_tail):
            raise OversizeReplyError(f"it has more than {max_bytes:,} bytes")


class PacedResponse(http.client.HTTPResponse):
    """A reply whose headers end within a minute, and whose body keeps a least rate.

    Timeouts of sockets bound the pause between two bytes: one byte a minute would never end.
    """

    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        raw = self.fp.detach() if isinstance(self.fp, io.BufferedReader) else None
        if raw is not None:
            self._pace = _PacedReader(raw)
            self.fp = io.BufferedReader(self._pace, _CHUNK)

    def begin(self) -> None:
        """Read the status and the headers."""
        super().begin()
        self._pace.begin_body()


class _PacedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._stop = time.monotonic() + _HEADER_SECONDS
        self._is_body = False

    def begin_body(self) -> None:
        self._stop = time.monotonic() + _HEADER_SECONDS
        self._is_body = True

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int | None:
        count: int | None = self._raw.readinto(buffer)
        if count:
            if self._is_body:
                self._stop += count / _LEAST_BYTES_PER_SECOND
            if time.monotonic() > self._stop:
                raise SlowReplyError("the reply comes too slowly")
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
            super().close()


def paced_pools(http_pool: Any, https_pool: Any) -> dict[str, Any]:
    """Return classes of pools of urllib3, by scheme, whose replies are `PacedResponse`s."""
    pools = {}
    for scheme, pool in (("http", http_pool), ("https", https_pool)):
        connection = type("Paced", (pool.ConnectionCls,), {"response_class": PacedResponse})
        pools[scheme] = type("PacedPool", (pool,), {"ConnectionCls": connection})
    return pools
