"""A store in memory that counts what is read, and may make requests wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megtool.storage.location.path import StorePath
from megtool.storage.objects.cache import object_cache
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import Listing, ObjectInfo


class CountingStore(MemoryStore):
    """Counts requests and bytes. Each read waits for `latency` seconds.

    Reads of several threads also wait, for a second at most, until `awaited` are in flight.
    """

    def __init__(self, url: str, *, latency: float = 0.0, awaited: int = 0) -> None:
        super().__init__(url)
        self.latency = latency
        self.awaited = awaited
        self.lists = self.heads = 0
        self.reads: list[tuple[str, int, int]] = []
        self.in_flight = self.most_in_flight = 0
        self._counts = threading.Condition()
        register_store(self)

    def forget(self) -> None:
        """Begin again, as a new process does."""
        store_index().forget(StorePath(self.url))
        object_cache().clear()
        object_cache().peak_bytes = 0
        self.reads.clear()
        self.lists = self.heads = self.most_in_flight = 0

    @property
    def num_bytes_read(self) -> int:
        """The bytes of all reads."""
        return sum(num_bytes for _, _, num_bytes in self.reads)

    def upload(self, path: Path, key: str) -> StorePath:
        """Put a file, or what is in a folder; returns where."""
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                inner = f"/{file.relative_to(path).as_posix()}" if file != path else ""
                self.put(key + inner, file.read_bytes())
        return StorePath(f"{self.url}/{key}")

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        self.lists += 1
        return super().list(prefix, recursive=recursive, most=most)

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        self.heads += 1
        return super().head(key)

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        with self._counts:
            self.reads.append((key, offset, num_bytes))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._counts.notify_all()
            if self.in_flight > 1:
                self._counts.wait_for(lambda: self.most_in_flight >= self.awaited, timeout=1)
        try:
            time.sleep(self.latency)
            return super().read(key, offset, num_bytes, version=version)
        finally:
            with self._counts:
                self.in_flight -= 1
