"""A static web server over a folder, with or without ranges, that remembers its requests."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote, urlsplit


@dataclass(frozen=True)
class StaticRequest:
    """One request and its answer; `size` is the length of the body that was sent."""

    method: str
    path: str
    range: str | None
    status: int
    size: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the requests are recorded."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        site: HttpFiles = self.server.site
        path = (site.root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(site.root.resolve()) or not path.is_file():
            self._send(404, b"", {}, with_body)
            return
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = {"ETag": etag, "Last-Modified": self.date_time_string(path.stat().st_mtime)}
        match_ = self.headers.get("If-Match")
        if match_ is not None and match_ not in ("*", etag):
            self._send(412, b"", headers, with_body)
            return
        if not site.has_ranges:
            self._send(200, data, headers, with_body)
            return
        headers["Accept-Ranges"] = "bytes"
        wish = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wish is None or wish[0] == "bytes=-":
            self._send(200, data, headers, with_body)
            return
        start = int(wish[1]) if wish[1] else max(0, len(data) - int(wish[2]))
        stop = min(int(wish[2]) + 1, len(data)) if wish[1] and wish[2] else len(data)
        if start >= stop:
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"}, with_body)
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(206, data[start:stop], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        sent = len(body) if with_body else 0
        wish = self.headers.get("Range")
        site: HttpFiles = self.server.site
        site.requests.append(StaticRequest(self.command, self.path, wish, status, sent))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@dataclass
class HttpFiles:
    """The files below `root` at `url(path)`; without `has_ranges` every answer is a whole file."""

    root: Path
    has_ranges: bool = True
    requests: list[StaticRequest] = field(default_factory=list)

    def __enter__(self) -> HttpFiles:
        self._server: Any = _Server(("127.0.0.1", 0), _Handler)
        self._server.site = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{quote(path)}"
