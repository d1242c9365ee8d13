"""Cells: encoded shards decoded whole, and held for a while as files in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.open_files import OpenFiles

CELL_BYTES = 256 << 20
"""Decoded cells that nobody reads are dropped, those used longest ago first, beyond this."""


class Readers(OpenFiles):
    """Descriptors to read sources from: of their files, and of their cells decoded into memory.

    A cell thus looks like any file of raw bytes, and everything that moves bytes moves it, the
    kernel's own copies included. Cells in use are never dropped: what a tile needs at once is the
    least memory they take.
    """

    def __init__(
        self, files: Files, sources: Sequence[Catalogue], *, cell_bytes: int | None = None
    ) -> None:
        super().__init__(files)
        self._sources = [c for c in sources if c.cells is not None]
        self._cell_bytes = CELL_BYTES if cell_bytes is None else cell_bytes
        self._sizes: dict[Path, int] = {}
        if self._sources:
            self._open = self._open_any

    def _open_any(self, path: Path) -> int:
        number = path.name.rpartition("#")[2]
        for c in self._sources if number.isdecimal() else ():
            shard = int(number)
            if shard < len(c.shards) and c.cells and c.cells.held[shard]:
                if c.cell_path(shard) != path:
                    continue
                data = c.cells.read(shard)
                fd = self._files.open_memory(path, data)
                with self._lock:
                    self._sizes[path] = data.nbytes
                return fd
        return self._files.open_read(path)

    def _surplus(self) -> list[int]:
        out = super()._surplus()
        cells = [p for p in self._held if p in self._sizes] if self._sizes else []
        total = sum(self._sizes[p] for p in cells)
        for path in cells:
            if total <= self._cell_bytes:
                break
            if not self._held[path][1]:
                out.append(self._held.pop(path)[0])
                total -= self._sizes[path]
        return out
