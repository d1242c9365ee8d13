"""An in-memory destination: executing a plan loads tensors instead of writing files.

`plan_memory_layout` places tensors in memory files, `MemoryStage` holds these files while the plan
is executed, and `MemoryStage.tensors` are torch tensors over the same memory: no second copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.checkpoint.storage.files import DESCRIPTORS
from megtool.errors import FormatError, StorageError
from megtool.tensors.sharded import GlobalTensor, Shards, widest

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Tensors start at multiples of this: a cache line, and the widest vector register."""


def plan_memory_layout(tensors: Sequence[GlobalTensor], group: Callable[[str], str]) -> Destination:
    """Place whole tensors one after another, in one file per group (`group` takes a name)."""
    files: dict[str, int] = {}
    sizes: list[int] = []
    file, offset = [], []
    for t in tensors:
        number = files.setdefault(group(t.name), len(files))
        if number == len(sizes):
            sizes.append(0)
        start = -(-sizes[number] // ALIGNMENT) * ALIGNMENT
        file.append(number)
        offset.append(start)
        sizes[number] = start + t.num_bytes
    shards = Shards.build(
        ((n, (0,) * len(t.shape), t.shape, file[n]) for n, t in enumerate(tensors)),
        widest(tensors),
    )
    catalogue = Catalogue(
        format="memory",
        root=Path(),
        files=[StoredFile(path=name, size=sizes[number]) for name, number in files.items()],
        tensors=list(tensors),
        shards=shards,
        extents=Extents(
            file=np.array(file, np.int32),
            offset=np.array(offset, np.int64),
            length=np.array([t.num_bytes for t in tensors], np.int64),
        ),
    )
    return Destination(catalogue=catalogue, fragments=[])


class MemoryStage:
    """Files in memory that `copy.execute` writes to. Use in `with`.

    On Linux a file comes from `memfd_create` and is opened by its descriptor's path; elsewhere it
    is a temporary file that is unlinked at the end of the `with`. The memory is freed with the last
    tensor over it.
    """

    def __init__(self) -> None:
        self.resumed: set[int] = set()
        self._mapped: dict[str, mmap.mmap] = {}
        self._open: list[int] = []
        self._named: list[Path] = []

    def __enter__(self) -> MemoryStage:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open:
            os.close(fd)
        for path in self._named:
            path.unlink(missing_ok=True)
        self._open, self._named = [], []

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """Create a file of zeros of the given size; returns the path that opens it.

        Memory has no digests, so `cuts` has no effect.

        Raises:
            StorageError: there is no memory for it, or the system allows no more open files.
        """
        try:
            fd, path = _new_file()
        except OSError as e:
            raise StorageError(f"cannot allocate memory: {e.strerror or e}", file=relative) from e
        self._open.append(fd)
        if path.parent != DESCRIPTORS:
            self._named.append(path)
        if num_bytes:
            try:
                os.ftruncate(fd, num_bytes)
                self._mapped[relative] = mmap.mmap(fd, num_bytes)
            except (OSError, ValueError, OverflowError) as e:
                text = f"cannot allocate {num_bytes:,} bytes of memory: {e}"
                raise StorageError(text, file=relative) from e
        return path

    def write(self, relative: str, data: bytes) -> Path:
        """Refuse small files: only tensors can be loaded.

        Raises:
            FormatError: always.
        """
        raise FormatError(
            f"{len(data)} bytes that are not a tensor cannot be loaded", file=relative
        )

    def follow(self, context: object) -> Container[int]:
        """No unit: a load is never resumed."""
        return ()

    def finish(self, unit: int, note: str = "") -> None:
        """Do nothing: a load is never resumed."""

    def tensors(self, catalogue: Catalogue) -> dict[str, torch.Tensor]:
        """All tensors of a `plan_memory_layout` catalogue, over the memory they were written to.

        Raises:
            FormatError: this torch has no such type.
        """
        import torch

        for mapped in self._mapped.values():
            with contextlib.suppress(OSError):  # an older kernel: pages are mapped at first use
                mapped.madvise(_POPULATE_READ)
        shards, extents = catalogue.shards, catalogue.extents
        rows = zip(
            shards.tensor.tolist(), extents.file.tolist(), extents.offset.tolist(), strict=True
        )
        out: dict[str, torch.Tensor] = {}
        for number, file, offset in rows:
            stored = catalogue.tensors[number]
            kind = getattr(torch, stored.dtype.name, None)
            if not isinstance(kind, torch.dtype):
                raise FormatError(
                    f"this torch has no dtype {stored.dtype.name!r}",
                    tensor=stored.name,
                    hint="pip install -U torch",
                )
            if not stored.numel:
                out[stored.name] = torch.empty(stored.shape, dtype=kind)
                continue
            memory = self._mapped[catalogue.files[file].path]
            flat = torch.frombuffer(memory, dtype=kind, count=stored.numel, offset=offset)
            out[stored.name] = flat.view(stored.shape)
        return out


_POPULATE_READ = 22  # Linux 5.14: map all pages in one call


def _new_file() -> tuple[int, Path]:
    """An empty memory file: its descriptor, and a path that opens it again."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fd = os.memfd_create("megtool", os.MFD_CLOEXEC)
            if (path := DESCRIPTORS / str(fd)).exists():
                return fd, path
            os.close(fd)  # no /proc here
    fd, name = tempfile.mkstemp(prefix="megtool-")
    return fd, Path(name)


def free_memory() -> int | None:
    """Bytes that this process can still allocate; None if the system does not report it.

    Reclaimable caches count as free. The limit of the control group (of a container) applies if it
    is lower.
    """
    limits = [n for n in (_machine_memory(), _cgroup_memory()) if n is not None]
    return min(limits, default=None)


def _machine_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        return None


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free memory within a container's limit (control groups version 2)."""
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = (root / "memory.stat").read_text()
        cached = int(stat.split("inactive_file ")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return max(limit - used + cached, 0)
