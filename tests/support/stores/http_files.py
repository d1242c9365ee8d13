"""A static web server over a folder, with or without ranges, that remembers its requests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tests.support.stores.loopback import LoopbackHandler, LoopbackService


@dataclass(frozen=True)
class StaticRequest:
    """One request and its answer; `size` is the length of the body that was sent."""

    method: str
    path: str
    range: str | None
    status: int
    size: int


class _StaticHandler(LoopbackHandler):
    def do_GET(self) -> None:
        site: HttpFiles = self.server.service
        path = (site.root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(site.root.resolve()) or not path.is_file():
            self._send(404)
            return
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = {}
        if site.has_versions:
            modified = self.date_time_string(path.stat().st_mtime)
            headers = {"ETag": etag, "Last-Modified": modified}
        match_ = self.headers.get("If-Match")
        if match_ is not None and match_ not in ("*", etag):
            self._send(412, headers)
            return
        if not site.has_ranges:
            self._send(200, headers, data)
            return
        headers["Accept-Ranges"] = "bytes"
        wish = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wish is None or wish[0] == "bytes=-":
            self._send(200, headers, data)
            return
        start = int(wish[1]) if wish[1] else max(0, len(data) - int(wish[2]))
        stop = min(int(wish[2]) + 1, len(data)) if wish[1] and wish[2] else len(data)
        if start >= stop:
            self._send(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._send(206, headers, data[start:stop])

    do_HEAD = do_GET

    def _send(
        self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        site: HttpFiles = self.server.service
        sent = len(body) if self.command == "GET" else 0
        wish = self.headers.get("Range")
        site.requests.append(StaticRequest(self.command, self.path, wish, status, sent))
        self.send(status, headers or {}, body)


@dataclass
class HttpFiles(LoopbackService):
    """The files below `root` at `url(path)`; without `has_ranges` every answer is a whole file.

    Without `has_versions` no answer has an ETag or a time.
    """

    handler = _StaticHandler

    root: Path
    has_ranges: bool = True
    has_versions: bool = True
    requests: list[StaticRequest] = field(default_factory=list)

    def url(self, path: str = "") -> str:
        return f"{self.endpoint}/{quote(path)}"
