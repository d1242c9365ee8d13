"""A proxy between a client and an HTTP server that records requests and breaks those it is told to.

It forwards the Host header as the client signed it, so a server that checks signatures takes what
it forwards.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from tests.support.stores.loopback import LoopbackHandler, LoopbackService

CHUNK = 1 << 16
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class Action(Enum):
    """What happens to a request."""

    CUT = auto()
    """The connection breaks before the server gets the request."""
    LOSE_REPLY = auto()
    """The server carries the request out, and the connection breaks before its reply."""
    ANSWER = auto()
    """The proxy answers with `status` and `code`; the server never gets the request."""
    ANSWER_AFTERWARDS = auto()
    """The server carries the request out, and its reply is replaced by `status` and `code`."""
    TRUNCATE = auto()
    """The connection breaks after `offset` bytes of the reply's body; negative: from its end."""
    SHORTEN = auto()
    """The reply's body ends at `offset`, and its Content-Length agrees."""
    FLIP = auto()
    """One bit of the reply's body changes, in the byte at `offset`."""
    FLIP_REQUEST = auto()
    """One bit of the request's body changes, in the byte at `offset`."""
    DROP_HEADERS = auto()
    """The server does not get the request's `headers`: (name, any value)."""


@dataclass(frozen=True)
class Fault:
    """What to do to which requests.

    `pattern` is searched in "METHOD /path?query RANGE". Of the requests that match, the first
    `skip` pass, and the next `times` (None: all) are met. `Fault(Action.CUT, skip=7)` is for the
    eighth request.
    """

    action: Action
    pattern: str = ""
    skip: int = 0
    times: int | None = 1
    status: int = 503
    code: str = "SlowDown"
    detail: str = ""
    """Further elements of the XML of an answer, such as `<Region>eu-west-1</Region>`."""

    offset: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    """Of the answer; for `DROP_HEADERS` of the request."""


@dataclass
class ProxiedRequest:
    """One request as the proxy saw it.

    `bytes_in` and `bytes_out` count the body of the request and the part of the reply's body that
    was sent on. `status` is what the client got: None if the connection broke before a reply.
    """

    number: int
    method: str
    path: str
    range: str | None
    headers: dict[str, str]
    bytes_in: int = 0
    bytes_out: int = 0
    status: int | None = None
    action: Action | None = None

    @property
    def line(self) -> str:
        """What patterns are searched in."""
        return f"{self.method} {self.path} {self.range or ''}".rstrip()


class _ConnectionCutError(Exception):
    """The client's connection is to be broken now."""


class _ProxyHandler(LoopbackHandler):
    def handle(self) -> None:
        proxy: FaultProxy = self.server.service
        with proxy.track(self.connection):
            try:
                super().handle()
            except _ConnectionCutError:
                # With a zero linger time, closing sends a reset.
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.connection.shutdown(socket.SHUT_RD)
            except OSError:
                pass  # the client went away
            self.close_connection = True

    def do_any(self) -> None:
        proxy: FaultProxy = self.server.service
        request, fault = proxy.record(self.command, self.path, dict(self.headers.items()))
        body = self._read_body(proxy)
        request.bytes_in = len(body)
        proxy.sleep(proxy.latency)
        action = fault.action if fault else None
        if action is Action.CUT:
            raise _ConnectionCutError
        if fault and action is Action.ANSWER:
            self._send_error(request, fault)
            return
        if fault and action is Action.FLIP_REQUEST:
            body = flip(body, fault.offset)
        dropped = {name.lower() for name, _ in fault.headers} if fault else set()
        try:
            status, headers, reply = self._forward(proxy, body, dropped)
        except (OSError, HTTPException) as error:
            raise _ConnectionCutError from error
        if action is Action.LOSE_REPLY:
            raise _ConnectionCutError
        if fault and action is Action.ANSWER_AFTERWARDS:
            self._send_error(request, fault)
        elif fault and action is Action.TRUNCATE and reply:
            self._reply(request, status, headers, reply, stop=len(reply[: fault.offset]))
        elif fault and action is Action.SHORTEN:
            self._reply(request, status, headers, reply[: fault.offset])
        elif fault and action is Action.FLIP:
            self._reply(request, status, headers, flip(reply, fault.offset))
        else:
            self._reply(request, status, headers, reply)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def _read_body(self, proxy: FaultProxy) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass  # trailers
            return b"".join(parts)
        left = int(self.headers.get("Content-Length", 0))
        body, pace = bytearray(), proxy.pacer()
        while left > len(body):
            chunk = self.rfile.read(min(CHUNK, left - len(body)))
            if not chunk:
                raise _ConnectionCutError
            body += chunk
            pace(len(chunk))
        return bytes(body)

    def _forward(
        self, proxy: FaultProxy, body: bytes, dropped: set[str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = HTTPConnection(proxy.target, timeout=120)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP | dropped:
                    upstream.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body or None)
            reply = upstream.getresponse()
            headers = [(n, v) for n, v in reply.getheaders() if n.lower() not in HOP_BY_HOP]
            if self.command == "HEAD" and (length := reply.getheader("Content-Length")):
                headers.append(("Content-Length", length))
            return reply.status, headers, reply.read()
        finally:
            upstream.close()

    def _send_error(self, request: ProxiedRequest, fault: Fault) -> None:
        text = f"<Code>{fault.code}</Code><Message>{fault.code}</Message>{fault.detail}"
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error>{text}</Error>'.encode()
        headers = [("Content-Type", "application/xml"), *fault.headers]
        self._reply(request, fault.status, headers, b"" if self.command == "HEAD" else body)

    def _reply(
        self,
        request: ProxiedRequest,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        stop: int | None = None,
    ) -> None:
        """Send a reply; with `stop`, break the connection after so many bytes of its body."""
        proxy: FaultProxy = self.server.service
        request.status = status
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD" and status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        view, pace = memoryview(body)[:stop], proxy.pacer()
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            pace(len(chunk))
            self.wfile.write(chunk)
            request.bytes_out += len(chunk)
        if stop is not None:
            raise _ConnectionCutError


def flip(data: bytes, offset: int) -> bytes:
    """`data` with one bit changed in the byte at `offset`; empty data stays."""
    out = bytearray(data)
    if out:
        out[offset % len(out)] ^= 0x10
    return bytes(out)


@dataclass
class FaultProxy(LoopbackService):
    """A context that forwards requests to the server at `upstream`, a URL without a path.

    `latency` is in seconds and added to each request; `bandwidth` is in bytes per second, for each
    connection and direction, None for no limit. Both may change while the proxy runs, and so may
    `faults`.
    """

    handler = _ProxyHandler

    upstream: str
    latency: float = 0.0
    bandwidth: float | None = None
    faults: list[Fault] = field(default_factory=list)
    requests: list[ProxiedRequest] = field(default_factory=list)
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.target = urlsplit(self.upstream).netloc
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._matches: dict[int, int] = {}

    def __exit__(self, *ending: Any) -> None:
        super().__exit__(*ending)
        self.disconnect()

    def inject(self, action: Action, pattern: str = "", **settings: Any) -> Fault:
        """Add a fault, which counts the matching requests from now on."""
        fault = Fault(action, pattern, **settings)
        with self._lock:
            self.faults.append(fault)
            self._matches[id(fault)] = 0
        return fault

    def reset(self) -> None:
        """Forget faults and requests."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()
            self._matches.clear()

    def disconnect(self) -> None:
        """Break every connection."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def matching(self, pattern: str = "") -> list[ProxiedRequest]:
        """The requests in whose line `pattern` is found."""
        with self._lock:
            return [r for r in self.requests if re.search(pattern, r.line)]

    def bytes_in(self, pattern: str = "") -> int:
        """Bytes of bodies that clients sent."""
        return sum(request.bytes_in for request in self.matching(pattern))

    def bytes_out(self, pattern: str = "") -> int:
        """Bytes of bodies that clients were sent."""
        return sum(request.bytes_out for request in self.matching(pattern))

    def record(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[ProxiedRequest, Fault | None]:
        """Number a request, and choose the fault that meets it: the first that does."""
        ranges = {n.lower(): v for n, v in headers.items()}
        wish = ranges.get("range") or ranges.get("x-amz-copy-source-range")
        with self._lock:
            request = ProxiedRequest(len(self.requests), method, path, wish, ranges)
            self.requests.append(request)
            chosen = None
            for fault in self.faults:
                if re.search(fault.pattern, request.line):
                    count = self._matches[id(fault)] = self._matches.get(id(fault), 0) + 1
                    last = fault.skip + fault.times if fault.times is not None else count
                    if chosen is None and fault.skip < count <= last:
                        chosen = fault
            request.action = chosen.action if chosen else None
        return request, chosen

    def pacer(self) -> Callable[[int], None]:
        """What is told the size of each piece of a transfer, and waits until it is due.

        Pieces that were late are made up for, up to a quarter of a second.
        """
        due = self.clock()

        def pace(size: int) -> None:
            nonlocal due
            if self.bandwidth is not None:
                due = max(due, self.clock() - 0.25) + size / self.bandwidth
                self.sleep(max(0.0, due - self.clock()))

        return pace

    @contextmanager
    def track(self, connection: socket.socket) -> Iterator[None]:
        """Let `disconnect` know of a connection while it is open."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
