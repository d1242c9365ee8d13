"""An in-memory destination: executing a plan fills memory instead of writing files.

The memory is the caller's, or `allocate` makes it. What the plan copies unchanged is read from the
source's files straight into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.open_objects import MemoryObject, open_objects
from megtool.tensors.catalogue import IN_MEMORY, Catalogue, Destination, Extents, StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, widest

if TYPE_CHECKING:
    import torch

    from megtool.plan.worker import CopyContext

ALIGNMENT = 64
"""Tensors start at multiples of this: a cache line, and the widest vector register."""

_NUMBERS = itertools.count()

Memory = NDArray[np.uint8]


def plan_memory_layout(tensors: Sequence[GlobalTensor]) -> Destination:
    """Every tensor as a file of its own, with the tensor's name."""
    sizes = [t.num_bytes for t in tensors]
    shards = Shards.build(
        ((n, (0,) * len(t.shape), t.shape, n) for n, t in enumerate(tensors)), widest(tensors)
    )
    catalogue = Catalogue(
        format=IN_MEMORY,
        root=Path(),
        files=[StoredFile(path=t.name, size=n) for t, n in zip(tensors, sizes, strict=True)],
        tensors=list(tensors),
        shards=shards,
        extents=Extents(
            file=np.arange(len(tensors), dtype=np.int32),
            offset=np.zeros(len(tensors), np.int64),
            length=np.array(sizes, np.int64),
        ),
    )
    return Destination(catalogue=catalogue, fragments=[])


def allocate(tensors: Iterable[GlobalTensor]) -> dict[str, Memory]:
    """Memory for each tensor, not initialized; it is freed with the last array over it.

    Raises:
        StorageError: there is not enough.
    """
    out: dict[str, Memory] = {}
    for t in tensors:
        try:
            block = np.empty(t.num_bytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as e:
            text = f"cannot allocate {t.num_bytes:,} bytes of memory"
            raise StorageError(text, tensor=t.name) from e
        start = -block.ctypes.data % ALIGNMENT
        out[t.name] = block[start : start + t.num_bytes]
    return out


class MemoryStage:
    """Memory that `execute.execute` fills: of every tensor, by name, the bytes it has; a context.

    Arrays have to be C-contiguous and writable.
    """

    def __init__(self, memory: Mapping[str, Memory]) -> None:
        self.resumed: set[int] = set()
        self._memory = memory
        self._bucket = StorePath(f"memory://filled-{next(_NUMBERS)}")
        self._opened: list[StorePath] = []

    def __enter__(self) -> MemoryStage:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._opened:
            open_objects().construct(path, None)
        self._opened = []

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """The path under which the memory of a tensor is opened.

        Memory has no digests, so `cuts` has no effect.
        """
        path = self._bucket / str(len(self._opened))
        memory = MemoryObject(path, self._memory[relative])
        memory.truncate(num_bytes)
        self._opened.append(path)
        open_objects().construct(path, memory)
        return path

    def write(self, relative: str, data: bytes) -> Path:
        """Refuse small files: only tensors can be loaded.

        Raises:
            FormatError: always.
        """
        raise FormatError(
            f"{len(data)} bytes that are not a tensor cannot be loaded", file=relative
        )

    def follow(self, context: CopyContext) -> Container[int]:
        """No unit: a load is never resumed."""
        return ()

    def finish(self, unit: int, note: str = "") -> None:
        """Do nothing: a load is never resumed."""


def as_torch(memory: Memory, tensor: GlobalTensor) -> torch.Tensor:
    """A torch tensor over memory.

    Raises:
        FormatError: this torch has no such type.
    """
    import torch

    kind = getattr(torch, tensor.dtype.name, None)
    if not isinstance(kind, torch.dtype):
        raise FormatError(
            f"this torch has no dtype {tensor.dtype.name!r}",
            tensor=tensor.name,
            hint="pip install -U torch",
        )
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=kind)
    return torch.from_numpy(memory).view(kind).view(tensor.shape)


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
