"""Stores in memory for tests: small parts, counted calls, and a process that dies at one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from megtool.errors import StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.index import store_index
from megtool.storage.stores.memory import MemoryStore

URL = "memory://bucket"
PART_BYTES = 1000

METHODS = (
    *("head", "list", "read", "put", "delete", "begin_upload", "upload_part", "copy_part"),
    *("list_parts", "list_uploads", "complete_upload", "is_made_of", "abort_upload"),
)


class VisibleStore(MemoryStore):
    """Shows what it holds to tests, past its requests."""

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """The contents of all objects below a prefix, by the rest of their keys."""
        start = f"{prefix}/" if prefix else ""
        return {
            key[len(start) :]: data
            for key, (_, data) in self._objects.items()
            if key.startswith(start)
        }


class CountedStore(VisibleStore):
    """Counts its calls, and what each part and object was written with.

    Call number `dies_at` and all after it fail, as for a process that is killed: with
    `is_done` that call still reaches the store, and only its reply is lost. Puts that replace a
    version are not counted: leases are renewed with them, which takes place by the clock.
    """

    def __init__(self, url: str = URL, *, min_part_bytes: int = PART_BYTES) -> None:
        super().__init__(url, min_part_bytes=min_part_bytes)
        self.calls: Counter[str] = Counter()
        self.uploads: Counter[tuple[str, int]] = Counter()
        self.dies_at = 0
        self.is_done = False
        self._inside = threading.local()
        self.sent_bytes = self.read_bytes = 0

    @property
    def num_calls(self) -> int:
        """All calls so far."""
        return self.calls.total()

    def revive(self) -> None:
        """A new process: nothing fails."""
        self.dies_at = 0
        store_index().forget(StorePath(self.url))

    @property
    def num_uploads(self) -> int:
        """Uploads that are under way."""
        return len(self._uploads)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        is_counted = not (name == "put" and keywords.get("version"))
        self.calls[name] += is_counted
        is_last = self.dies_at and self.num_calls >= self.dies_at
        if is_last and not (is_counted and self.is_done and self.num_calls == self.dies_at):
            raise StorageError("the process is dead", file=self.url)
        result = function(*args, **keywords)
        args = args[1:]
        if is_last:
            raise StorageError("the process is dead", file=self.url)
        if name == "upload_part":
            self.uploads[args[0], args[2]] += 1
            self.sent_bytes += memoryview(args[3]).nbytes
        elif name == "copy_part":
            self.uploads[args[0], args[2]] += 1
        elif name == "put":
            self.sent_bytes += memoryview(args[1]).nbytes
        elif name == "read":
            self.read_bytes += args[2]
        return result


def _counted(name: str) -> Callable[..., Any]:
    inner = getattr(MemoryStore, name)

    def method(self: CountedStore, *args: Any, **keywords: Any) -> Any:
        if getattr(self._inside, "is_call", False):  # a method of the store that calls another
            return inner(self, *args, **keywords)
        self._inside.is_call = True
        try:
            return self._call(name, inner, self, *args, **keywords)
        finally:
            self._inside.is_call = False

    return method


for _name in METHODS:
    setattr(CountedStore, _name, _counted(_name))
