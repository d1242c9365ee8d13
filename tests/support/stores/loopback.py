"""HTTP services of this process, on free ports of the loopback interface."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self

POLL_SECONDS = 0.05
"""How long a server takes to notice that it is to stop."""

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class LoopbackHandler(BaseHTTPRequestHandler):
    """Answers on connections that persist, and logs nothing; `server.service` is the service."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: services record their requests."""

    def read_body(self) -> bytes:
        """The body of a request of known length."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a reply; without its body to HEAD."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def cut_range(self, data: bytes) -> Reply:
        """The reply with the bytes that the header `Range` (`bytes=FIRST-LAST`) asks for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            return 200, {}, data
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return 206, headers, data[start:stop]


class LoopbackServer(ThreadingHTTPServer):
    """A server in a thread, which runs inside `with`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[LoopbackHandler], service: object) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.service = service
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,))

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class LoopbackService:
    """A context with a server at `endpoint` whose requests go to `handler`."""

    handler: ClassVar[type[LoopbackHandler]]

    def __enter__(self) -> Self:
        self._server = LoopbackServer(self.handler, self).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.__exit__()

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._server.endpoint
