"""Google Cloud Storage's JSON API in memory, with preconditions and the limits of `compose`.

`gcp-storage-emulator` ignores preconditions; the tests of commits need a server that heeds them.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.stores.loopback import LoopbackHandler, LoopbackService, Reply

PAGE = 7
"""Objects a page, so that pages are turned."""


@dataclass
class _Object:
    data: bytes
    generation: int
    updated: str
    metadata: dict[str, str] = field(default_factory=dict)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str = "") -> None:
        self.status, self.message = status, message


class _GcsHandler(LoopbackHandler):
    def do_any(self) -> None:
        gcs: GcsServer = self.server.service
        body = self.read_body()
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with gcs.lock:
            gcs.requests.append(f"{self.command} {self.path}")
            try:
                if gcs.token and self.headers.get("Authorization") != f"Bearer {gcs.token}":
                    raise _RefusedError(401, "Invalid Credentials")
                status, headers, reply = self._answer(gcs, url.path, query, body)
            except _RefusedError as e:
                status, headers = e.status, {}
                reply = json.dumps({"error": {"code": status, "message": e.message}}).encode()
        self.send(status, headers, reply)

    do_GET = do_POST = do_DELETE = do_any

    def _answer(self, gcs: GcsServer, path: str, query: dict[str, str], body: bytes) -> Reply:
        match = re.fullmatch(r"(/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?(/compose)?", path)
        if match is None:
            raise _RefusedError(400, "bad path")
        if match[2] != gcs.bucket:
            raise _RefusedError(404, "The specified bucket does not exist.")
        key = unquote(match[3] or "")
        if match[1]:
            return _json(gcs.write(query["name"], body, query))
        if match[4]:
            asked = json.loads(body)
            sources, metadata = asked["sourceObjects"], asked["destination"].get("metadata")
            if not 1 <= len(sources) <= 32:
                raise _RefusedError(400, "The number of source components is out of range.")
            data = b"".join(gcs.find(s["name"], str(s["generation"])).data for s in sources)
            return _json(gcs.write(key, data, query, metadata))
        if not key:
            return _json(gcs.list(query))
        found = gcs.find(key)
        if self.command == "DELETE":
            del gcs.objects[key]
            return 204, {}, b""
        gcs.check(key, query)
        if query.get("alt") != "media":
            return _json(gcs.resource(key))
        status, headers, data = self.cut_range(found.data)
        return status, {**headers, "x-goog-generation": str(found.generation)}, data


def _json(value: Any) -> Reply:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@dataclass
class GcsServer(LoopbackService):
    """A context with one bucket at `endpoint`; with `token`, requests must bear it."""

    handler = _GcsHandler

    bucket: str = "bucket"
    token: str = ""
    objects: dict[str, _Object] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.lock = threading.RLock()
        self._generation = 0
        return super().__enter__()

    def check(self, key: str, query: dict[str, str]) -> None:
        """Raise if a precondition on the generation does not hold."""
        wish = query.get("ifGenerationMatch")
        found = self.objects.get(key)
        if wish is not None and int(wish) != (found.generation if found else 0):
            raise _RefusedError(
                412, "At least one of the pre-conditions you specified did not hold."
            )

    def find(self, key: str, generation: str = "") -> _Object:
        found = self.objects.get(key)
        if found is None or (generation and str(found.generation) != generation):
            raise _RefusedError(404, f"No such object: {self.bucket}/{key}")
        return found

    def write(
        self, key: str, data: bytes, query: dict[str, str], metadata: dict[str, str] | None = None
    ) -> dict[str, Any]:
        self.check(key, query)
        self._generation += 1
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        generation = 1_700_000_000_000_000 + self._generation
        self.objects[key] = _Object(data, generation, now, metadata or {})
        return self.resource(key)

    def resource(self, key: str) -> dict[str, Any]:
        found = self.objects[key]
        return {
            "name": key,
            "size": str(len(found.data)),
            "generation": str(found.generation),
            "updated": found.updated,
            **({"metadata": found.metadata} if found.metadata else {}),
        }

    def list(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        entries: dict[str, str] = {}
        for key in sorted(k for k in self.objects if k.startswith(prefix)):
            head, mark, _ = key[len(prefix) :].partition(delimiter or "\0")
            entries[prefix + head + mark] = "prefix" if mark else "item"
        names = [n for n in entries if n > query.get("pageToken", "")]
        out: dict[str, Any] = {
            "items": [self.resource(n) for n in names[:PAGE] if entries[n] == "item"],
            "prefixes": [n for n in names[:PAGE] if entries[n] == "prefix"],
        }
        if len(names) > PAGE:
            out["nextPageToken"] = names[PAGE - 1]
        return out
