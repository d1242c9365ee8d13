"""Limits on what a remote may answer: bytes and time of a reply, pages of a listing."""

from __future__ import annotations

import http.client
import io
import re
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any

from megtool.errors import StorageError
from megtool.storage.stores.retries import CONNECTIONS

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


def refuse_oversize(error: OversizeReplyError, place: str) -> StorageError:
    """Return the error for a reply that is too large."""
    return StorageError(
        f"the server's reply is not read: {error}",
        file=place,
        hint="check the address: something else than a store of files may answer there",
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
    num_sent, inflate = 0, None
    if encoding.lower() in ("gzip", "x-gzip", "deflate"):
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
    while True:
        data = raw.read(_CHUNK, decode_content=False)
        if not data:
            return bytes(out)
        num_sent += len(data)
        if inflate is None:
            out += data
        while inflate is not None and data:  # gzip may have several members, one behind the other
            try:
                out += inflate.decompress(data, max_bytes + 1 - len(out))
            except zlib.error as e:
                raise OversizeReplyError("its compressed bytes are damaged") from e
            if len(out) > max_bytes or inflate.unconsumed_tail:
                raise OversizeReplyError(f"it has more than {max_bytes:,} bytes")
            data = inflate.unused_data
            if inflate.eof:
                inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        if max(num_sent, len(out)) > max_bytes:
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


_SDK_BODY_BYTES = 8 << 20
"""A page of 5,000 objects has half of it; parsers of XML need thirty times as much memory."""

_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")


def make_bounded_session() -> Any:
    """Return a session of requests for an SDK, whose replies have no more bytes than asked for.

    A reply to a request with a range has the bytes of the range, any other `_SDK_BODY_BYTES`; what
    `Content-Encoding` says is left to the reader. Replies are `PacedResponse`s.
    """
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    class BoundedAdapter(HTTPAdapter):
        def send(self, request: Any, *args: Any, **named: Any) -> Any:
            response: Any = super().send(request, *args, **named)
            wish = request.headers.get("x-ms-range") or request.headers.get("Range") or ""
            match = _RANGE.fullmatch(wish) if response.status_code in (200, 206) else None
            most = int(match[2]) + 1 - int(match[1]) if match else _SDK_BODY_BYTES
            response.raw = _BoundedBody(response.raw, most)
            return response

    session = requests.Session()
    for scheme in ("http://", "https://"):
        adapter = BoundedAdapter(pool_maxsize=CONNECTIONS)
        adapter.poolmanager.pool_classes_by_scheme = paced_pools(
            HTTPConnectionPool, HTTPSConnectionPool
        )
        adapter.poolmanager.connection_pool_kw["blocksize"] = _CHUNK
        session.mount(scheme, adapter)
    session.headers["Accept-Encoding"] = "identity"
    return session


class _BoundedBody:
    """A reply of urllib3 whose body ends with an error after `most` bytes."""

    def __init__(self, raw: Any, most: int) -> None:
        self._raw, self._most = raw, most

    def stream(self, amt: int = _CHUNK, decode_content: bool | None = None) -> Iterator[bytes]:
        left = self._most
        for chunk in self._raw.stream(min(amt, left + 1), decode_content=False):
            left -= len(chunk)
            if left < 0:
                self._raw.close()
                raise OversizeReplyError(f"it has more than {self._most:,} bytes")
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_raw", "_most"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._raw, name, value)
