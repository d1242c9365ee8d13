"""Encoded chunks, decoded whole and cached as files in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megtool.storage.files import Files
from megtool.storage.open_files import OpenFiles
from megtool.tensors.catalogue import Catalogue

CACHE_BYTES = 256 << 20
"""Beyond this size, unused decoded chunks are dropped, least recently used first."""


class SourceFiles(OpenFiles):
    """Descriptors for reading sources: of their files, and of chunks decoded into memory.

    A decoded chunk looks like any file of raw bytes, so every copy path works, the kernel's copies
    included. Chunks in use are never dropped.
    """

    def __init__(
        self, files: Files, sources: Sequence[Catalogue], *, cache_bytes: int | None = None
    ) -> None:
        super().__init__(files)
        self._sources = [c for c in sources if c.encoded_chunks is not None]
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self._sizes: dict[Path, int] = {}
        if self._sources:
            self._open = self._open_any

    def _open_any(self, path: Path) -> int:
        number = path.name.rpartition("#")[2]
        for c in self._sources if number.isdecimal() else ():
            shard = int(number)
            if shard < len(c.shards) and c.encoded_chunks and c.encoded_chunks.mask[shard]:
                if c.encoded_chunk_path(shard) != path:
                    continue
                data = c.encoded_chunks.read(shard)
                fd = self._files.open_memory(path, data)
                with self._lock:
                    self._sizes[path] = data.nbytes
                return fd
        return self._files.open_read(path)

    def _surplus(self) -> list[int]:
        out = super()._surplus()
        chunks = [p for p in self._entries if p in self._sizes] if self._sizes else []
        total = sum(self._sizes[p] for p in chunks)
        for path in chunks:
            if total <= self._cache_bytes:
                break
            if not self._entries[path][1]:
                out.append(self._entries.pop(path)[0])
                total -= self._sizes[path]
        return out
