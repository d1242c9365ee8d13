"""The part of the Hugging Face Hub's API that reading a repository needs, over files in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.stores.loopback import LoopbackHandler, LoopbackServer, LoopbackService

LARGE = 1000
"""Files of more bytes are stored as LFS: the Hub redirects to another host for them."""


class _HubHandler(LoopbackHandler):
    def do_any(self) -> None:
        hub: HubServer = self.server.service
        body = self.read_body()
        is_cdn = self.server is hub.cdn
        request = ("cdn" if is_cdn else "hub", self.command, unquote(self.path))
        with hub.lock:
            hub.requests.append((*request, self.headers.get("Authorization")))
        if is_cdn:
            self._blob(hub)
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            code = "GatedRepo" if hub.is_gated else "RepoNotFound"
            self.send(401, {"X-Error-Code": code}, b"")
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
            self.send(404, {"X-Error-Code": "RepoNotFound"}, b"")
        elif resolve:
            self._resolve(hub, resolve[1], unquote(resolve[2]))
        elif api:
            revision = hub.commit_of(api[2])
            if revision is None:
                self.send(404, {"X-Error-Code": "RevisionNotFound"}, b"")
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
                    self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
                else:
                    self._json(entries)

    def _resolve(self, hub: HubServer, revision: str, name: str) -> None:
        data = hub.commits.get(revision, {}).get(name)
        if data is None:
            self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        elif len(data) <= LARGE:
            self.send(*self.cut_range(data))
        else:
            sha = hashlib.sha256(data).hexdigest()
            port = hub.cdn.server_address[1]
            place = f"http://localhost:{port}/{sha}?Signature=secret-{hub.epoch}"
            self.send(302, {"Location": place}, b"")

    def _blob(self, hub: HubServer) -> None:
        if not self.path.endswith(f"?Signature=secret-{hub.epoch}"):
            self.send(403, {}, b"")
            return
        sha = urlsplit(self.path).path[1:]
        for files in hub.commits.values():
            for data in files.values():
                if hashlib.sha256(data).hexdigest() == sha:
                    self.send(*self.cut_range(data))
                    return
        self.send(404, {}, b"")

    def _json(self, value: Any) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


@dataclass
class HubServer(LoopbackService):
    """A context with the repository `name` and a second server as its content delivery network.

    `commits` holds files by commit, `branches` commits by name. A change of `epoch` makes all
    signed addresses invalid. `requests` holds server, method, path and Authorization.
    """

    handler = _HubHandler

    name: str = "org/model"
    token: str = ""
    is_gated: bool = False
    epoch: int = 0
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.lock = threading.Lock()
        self.cdn = LoopbackServer(_HubHandler, self).__enter__()
        return super().__enter__()

    def __exit__(self, *ending: Any) -> None:
        super().__exit__(*ending)
        self.cdn.__exit__()

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
