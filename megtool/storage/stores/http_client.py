"""HTTP requests with retries, and ranges of bytes that are checked, for stores that speak HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from megtool.errors import FormatError, StorageError
from megtool.storage.stores.json_size import MAX_PARSED_BYTES, estimate_parsed_bytes
from megtool.storage.stores.protocol import (
    SEND_TIMEOUT,
    ConditionError,
    ObjectMissingError,
    truncated,
)
from megtool.storage.stores.reply_limits import (
    MAX_BODY_BYTES,
    MAX_ERROR_BYTES,
    OversizeReplyError,
    SlowReplyError,
    paced_pools,
    read_body,
    refuse_oversize,
)
from megtool.storage.stores.retries import ATTEMPTS, CONNECTIONS, pause
from megtool.storage.stores.schemes import missing_package

_TIMEOUTS = SEND_TIMEOUT, 60
"""Seconds to send, and between two bytes of the reply."""

_PATIENCE = 150.0
"""No attempt begins so many seconds after the first one began."""

_MAX_REDIRECTS = 10
_REDIRECTS = {301, 302, 303, 307, 308}

_BUSY = {408, 425, 429, 500, 502, 503, 504}
_REFUSED_FOR_LOAD = {429, 503}
"""The server did not carry the request out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """A reply with its body; `url` is where redirects led."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str

    def json(self) -> Any:
        """The body as JSON; an empty object if it is none, or nested or large without measure."""
        import json

        if estimate_parsed_bytes(self.body) > MAX_PARSED_BYTES:
            return {}
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return {}


class HttpClient:
    """A pool of connections. Thread-safe.

    `authorize` gives headers with credentials for each request; redirects to another host, port or
    scheme go there without them. Messages never contain what follows `?` in a URL. Replies have
    the limits of `reply_limits`.
    """

    def __init__(
        self,
        url: str,
        *,
        authorize: Callable[[], Mapping[str, str]] | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:
        try:
            import requests
            from urllib3.exceptions import HTTPError
        except ImportError as e:
            raise missing_package("requests", url) from e
        self._errors = requests.exceptions
        self._passing = self._errors.RequestException, HTTPError, OSError
        self._session = requests.Session()
        if authorize is not None:
            self._session.auth = lambda request: request  # not from ~/.netrc
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _make_adapter())
        self._session.headers.update({"User-Agent": "megtool", "Accept-Encoding": "identity"})
        self._authorize = authorize
        self._attempts = attempts

    def send(
        self,
        method: str,
        url: str,
        place: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        data: bytes | memoryview | None = None,
        is_repeatable: bool = True,
    ) -> HttpReply:
        """The reply to a request, of any status. `place` is the location that errors name.

        One that is not repeatable is only sent again if the server refused it for load.

        Raises:
            StorageError: no reply came.
        """
        start = time.monotonic()
        for attempt in range(self._attempts):
            is_last = attempt == self._attempts - 1
            try:
                with self._request(method, url, headers, params, data) as response:
                    reply = _to_reply(response, _read_body(response))
            except OversizeReplyError as e:
                raise refuse_oversize(e, place) from None
            except self._passing as e:
                is_late = time.monotonic() - start > _PATIENCE
                if is_last or is_late or not is_repeatable or not self._is_passing(e):
                    raise self._unreachable(e, place) from None
                pause(attempt)
                continue
            again = _BUSY if is_repeatable else _REFUSED_FOR_LOAD
            if reply.status not in again or is_last:
                return reply
            pause(attempt, reply.headers.get("Retry-After"))
        raise AssertionError("unreachable")

    def read_range(
        self,
        url: str,
        place: str,
        offset: int,
        num_bytes: int,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        check: Callable[[HttpReply], None] | None = None,
    ) -> memoryview:
        """Bytes of what is at a URL. `check` may raise for a reply of any status.

        Raises:
            ConditionError: the server says that a condition of the headers does not hold.
            ObjectMissingError: there is nothing.
            FormatError: it is shorter.
            StorageError: the server refuses, ignores ranges, or breaks off too often.
        """
        stop = offset + num_bytes
        wish = {**(headers or {}), "Range": f"bytes={offset}-{stop - 1}"}
        trouble = ""
        start = time.monotonic()
        attempt = 0
        while True:
            retry_after = None
            try:
                with self._request("GET", url, wish, params, None) as response:
                    status = response.status_code
                    is_body = status in (200, 206)
                    reply = _to_reply(response, b"" if is_body else _read_body(response))
                    if check is not None:
                        check(reply)
                    if is_body:
                        _check_range(reply, place, offset, stop)
                        data = response.raw.read(num_bytes + 1, decode_content=False)
                        if len(data) == num_bytes:
                            return memoryview(data)
                        trouble = f"{len(data):,} of {num_bytes:,} bytes came"
                    elif status in _BUSY:
                        trouble = f"HTTP {status}"
                        retry_after = reply.headers.get("Retry-After")
                    else:
                        raise error_of(reply, place, stop)
            except OversizeReplyError as e:
                raise refuse_oversize(e, place) from None
            except self._passing as e:
                if isinstance(e, self._errors.RequestException) and not self._is_passing(e):
                    raise self._unreachable(e, place) from None
                trouble = _reason(e)
            attempt += 1
            if attempt == self._attempts or time.monotonic() - start > _PATIENCE:
                break
            pause(attempt - 1, retry_after)
        raise StorageError(
            f"the server broke off {attempt} times: {trouble}",
            file=place,
            hint="run the command again later",
        )

    def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        params: Mapping[str, Any] | None,
        data: bytes | memoryview | None,
    ) -> Any:
        credentials = dict(self._authorize()) if self._authorize else {}
        body = bytes(data) if data is not None else None
        for _ in range(_MAX_REDIRECTS):
            response = self._session.request(
                method,
                url,
                headers={**credentials, **(headers or {})},
                params=params,
                data=body,
                timeout=_TIMEOUTS,
                stream=True,
                allow_redirects=False,
            )
            target = response.headers.get("Location")
            if response.status_code not in _REDIRECTS or not target or body is not None:
                return response
            response.close()
            before, url, params = response.url, urljoin(response.url, target), None
            if origin_of(url) != origin_of(before):
                credentials = {}
        raise self._errors.TooManyRedirects(f"more than {_MAX_REDIRECTS} redirects")

    def _is_passing(self, error: Exception) -> bool:
        x = self._errors
        if not isinstance(error, x.RequestException):
            return True  # the connection failed below the body
        is_settled = isinstance(error, x.SSLError | x.ProxyError | x.TooManyRedirects)
        return not is_settled and isinstance(
            error, x.ConnectionError | x.Timeout | x.ChunkedEncodingError | x.ContentDecodingError
        )

    def _unreachable(self, error: Exception, place: str) -> StorageError:
        return StorageError(
            f"the server cannot be reached: {_reason(error)}",
            file=place,
            hint="check the host name, the network, and HTTPS_PROXY if there is a proxy",
        )


def error_of(reply: HttpReply, place: str, stop: int = 0) -> StorageError | FormatError:
    """The error to raise for a reply that is no success."""
    status = reply.status
    if status in (404, 410):
        return ObjectMissingError("there is no such object", file=place)
    if status == 412:
        return ConditionError("the object exists already, or has another version", file=place)
    if status == 416:
        total = reply.headers.get("Content-Range", "").rpartition("/")[2]
        is_number = total.isascii() and total.isdigit() and len(total) <= 20
        return truncated(place, int(total) if is_number else None, stop)
    if status in (401, 403, 407):
        return StorageError(
            f"the server refuses access (HTTP {status})",
            file=place,
            hint="credentials for https:// come from ~/.netrc",
            error_id="permission-denied",
        )
    if status == 429:
        return StorageError(
            "the server limits the rate of requests (HTTP 429)",
            file=place,
            hint="run the command again later",
            error_id="throttled",
        )
    return StorageError(f"the server answered HTTP {status}", file=place)


def _check_range(reply: HttpReply, place: str, offset: int, stop: int) -> None:
    if reply.headers.get("Content-Encoding", "identity") not in ("", "identity"):
        raise StorageError(
            "the server sends compressed bytes, of which ranges cannot be read",
            file=place,
            error_id="ranges-ignored",
        )
    if reply.status == 200:
        if offset == 0 and reply.headers.get("Content-Length") == str(stop):
            return
        raise StorageError(
            "the server ignores ranges: it sends the whole file",
            file=place,
            hint="checkpoints are read in ranges; download it, or use a server with ranges",
            error_id="ranges-ignored",
        )
    match = re.fullmatch(
        r"bytes ([0-9]{1,20})-([0-9]{1,20})/([0-9]{1,20}|\*)",
        reply.headers.get("Content-Range", ""),
    )
    if match is None or int(match[1]) != offset:
        raise StorageError(
            f"the server sent another range than asked for: "
            f"{reply.headers.get('Content-Range', 'none')!r}",
            file=place,
            error_id="ranges-ignored",
        )
    if int(match[2]) + 1 < stop and match[3] == str(int(match[2]) + 1):
        raise truncated(place, int(match[3]), stop)


def _make_adapter() -> Any:
    """Return an adapter whose replies keep a least rate."""
    from requests.adapters import HTTPAdapter
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    adapter = HTTPAdapter(pool_maxsize=CONNECTIONS)
    adapter.poolmanager.pool_classes_by_scheme = paced_pools(
        HTTPConnectionPool, HTTPSConnectionPool
    )
    return adapter


def _read_body(response: Any) -> bytes:
    """Read the body of a reply: whole for a success, its first bytes for anything else."""
    encoding = response.headers.get("Content-Encoding", "")
    if response.status_code < 300:
        return read_body(response.raw, encoding, MAX_BODY_BYTES)
    try:
        return read_body(response.raw, encoding, MAX_ERROR_BYTES)
    except OversizeReplyError:
        response.close()
        return b""


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a URL: what credentials are for."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, parts.hostname or "", port


def _to_reply(response: Any, body: bytes) -> HttpReply:
    return HttpReply(
        status=response.status_code, headers=response.headers, body=body, url=response.url
    )


def _reason(error: BaseException) -> str:
    """Why no reply came, without the URL, which may hold a signature."""
    names: list[str] = []
    inner: BaseException | None = error
    while inner is not None and len(names) < 10:
        if isinstance(inner, SlowReplyError):
            return str(inner)
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        names.append(type(inner).__name__)
        reason = getattr(inner, "reason", None) or next(
            (a for a in inner.args if isinstance(a, BaseException)), None
        )
        inner = reason if isinstance(reason, BaseException) else inner.__cause__
    return names[-1] if names else "no reply"
