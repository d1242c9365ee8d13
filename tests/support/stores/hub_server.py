"""The part of the Hugging Face Hub's API that reading a repository needs, over files in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 1000
"""Files of more bytes are stored as LFS: the Hub redirects to another host for them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_any(self) -> None:
        hub: HubServer = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_cdn = self.server is hub.cdn
        request = ("cdn" if is_cdn else "hub", self.command, unquote(self.path))
        with hub.lock:
            hub.requests.append((*request, self.headers.get("Authorization")))
        if is_cdn:
            self._blob(hub)
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            code = "GatedRepo" if hub.is_gated else "RepoNotFound"
            self._send(401, b"", {"X-Error-Code": code})
        else:
            self._answer(hub, urlsplit(self.path).path, body)

    do_GET = do_POST = do_HEAD = do_any

    def _answer(self, hub: HubServer, path: str, body: bytes) -> None:
        api = re.fullmatch(
            rf"/api/models/{hub.name}/(revision|tree|paths-info)/([^/]+)(?:/(.*))?", path
        )
        resolve = re.fullmatch(rf"/{hub.name}/resolve/([^/]+)/(.+)", path)
        if path == f"/api/models/{hub.name}":
            self._json({"id": hub.name, "sha": hub.commit_of("main")})
        elif not (api or resolve):
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif resolve:
            self._resolve(hub, resolve[1], unquote(resolve[2]))
        elif api:
            revision = hub.commit_of(api[2])
            if revision is None:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif api[1] == "revision":
                self._json({"id": hub.name, "sha": revision})
            elif api[1] == "paths-info":
                text = body.decode()
                wish = json.loads(text)["paths"] if text.startswith("{") else []
                wish = wish or parse_qs(text).get("paths", [])
                self._json([e for e in hub.tree(revision, "", True) if e["path"] in wish])
            else:
                is_recursive = "recursive=true" in self.path.lower()
                entries = hub.tree(revision, unquote(api[3] or ""), is_recursive)
                if not entries:
                    self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                else:
                    self._json(entries)

    def _resolve(self, hub: HubServer, revision: str, name: str) -> None:
        data = hub.commits.get(revision, {}).get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif len(data) <= LARGE:
            self._range(data)
        else:
            sha = hashlib.sha256(data).hexdigest()
            port = hub.cdn.server_address[1]
            place = f"http://localhost:{port}/{sha}?Signature=secret-{hub.epoch}"
            self._send(302, b"", {"Location": place})

    def _blob(self, hub: HubServer) -> None:
        if not self.path.endswith(f"?Signature=secret-{hub.epoch}"):
            self._send(403, b"", {})
            return
        sha = urlsplit(self.path).path[1:]
        for files in hub.commits.values():
            for data in files.values():
                if hashlib.sha256(data).hexdigest() == sha:
                    self._range(data)
                    return
        self._send(404, b"", {})

    def _range(self, data: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None:
            self._send(200, data, {})
            return
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._send(206, data[start:stop], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@dataclass
class HubServer:
    """A context with the repository `name` and a second server as its content delivery network.

    `commits` holds files by commit, `branches` commits by name. A change of `epoch` makes all
    signed addresses invalid. `requests` holds server, method, path and Authorization.
    """

    name: str = "org/model"
    token: str = ""
    is_gated: bool = False
    epoch: int = 0
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        self.lock = threading.Lock()
        self._hub: Any = _Server(("127.0.0.1", 0), _Handler)
        self.cdn: Any = _Server(("127.0.0.1", 0), _Handler)
        self._threads = []
        for server in (self._hub, self.cdn):
            server.hub = self
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server, thread in zip((self._hub, self.cdn), self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_address[1]}"

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Let a branch mean these files; returns the commit."""
        text = json.dumps({n: hashlib.sha256(d).hexdigest() for n, d in sorted(files.items())})
        number = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[number] = files
        self.branches[branch] = number
        return number

    def commit_of(self, revision: str) -> str | None:
        revision = unquote(revision)
        return revision if revision in self.commits else self.branches.get(revision)

    def tree(self, commit: str, folder: str, is_recursive: bool) -> list[dict[str, Any]]:
        """Entries of a folder as the Hub describes them."""
        start = f"{folder}/" if folder else ""
        out: dict[str, dict[str, Any]] = {}
        for name, data in sorted(self.commits[commit].items()):
            if not name.startswith(start):
                continue
            head, slash, _ = name[len(start) :].partition("/")
            if slash:
                entry = {"type": "directory", "path": start + head, "oid": "0" * 40, "size": 0}
                out[start + head] = entry
                if not is_recursive:
                    continue
            entry = {"type": "file", "path": name, "size": len(data)}
            entry["oid"] = hashlib.sha1(data, usedforsecurity=False).hexdigest()
            if len(data) > LARGE:
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 130}
            out[name] = entry
        return list(out.values())
