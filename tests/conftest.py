"""Settings and fixtures that every test shares."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Several workers share few cores, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton's kernels run in Python where there is no GPU; it looks once, when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Time limits per example say more about the machine than about the code.
settings.register_profile("megtool", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("megtool")


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command run in this process sends the log to stderr; the next test finds it as before."""
    logger = logging.getLogger("megtool")
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    level, logger.handlers[:], logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


LONGEST = ("test_readme.py",)
"""Files that would keep one process busy at the end while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; skip, and say why, what needs a GPU where there is none."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def carry() -> Callable[..., dict[str, Any]]:
    """Move arrays from a read side to a written one, element by element through placements."""
    import numpy as np

    def view(array: Any, p: Any) -> Any:
        """The elements of a stored array that a placement names, in the placement's shape."""
        grids = np.indices(p.shape, sparse=True)
        index = [np.full((1,) * len(p.shape), b) for b in p.base]
        for j, (dim, mult) in enumerate(zip(p.dims, p.mults, strict=True)):
            index[dim] = index[dim] + grids[j] * mult
        return array, tuple(index)

    def move(source: Any, arrays: dict[str, Any], target: Any) -> dict[str, Any]:
        kind = next(iter(arrays.values())).dtype
        out = {t.name: np.zeros(t.shape, kind) for t in target.tensors}
        writes = {name: np.zeros(a.shape, np.int8) for name, a in out.items()}
        for name, p in target.placements.items():
            q = source.placements[name]
            array, index = view(arrays[q.stored], q)
            value = np.broadcast_to(array[index], q.shape).reshape(p.shape)
            array, index = view(out[p.stored], p)
            array[index] = value
            np.add.at(writes[p.stored], index, 1)
        for fill in target.fills:
            array, index = view(out[fill.placement.stored], fill.placement)
            array[index] = fill.value
            np.add.at(writes[fill.placement.stored], index, 1)
        for name, count in writes.items():
            assert (count == 1).all(), f"{name} is not written exactly once"
        return out

    return move


@pytest.fixture(scope="session")
def materialize() -> Callable[[Any, Path, dict[str, Any]], None]:
    """Write a destination and the tensors (numpy, in the dtype's view) that belong into it."""
    import numpy as np

    def write(destination: Any, root: Path, arrays: dict[str, Any]) -> None:
        c = destination.catalogue
        files = [bytearray(f.size) for f in c.files]
        for number, offset, data in destination.fragments:
            files[number][offset : offset + len(data)] = data
        for row, t in enumerate(c.shards.tensor.tolist()):
            array = arrays[c.tensors[t].name]
            lo, hi = c.shards.boxes.lo[row], c.shards.boxes.hi[row]
            box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))[: array.ndim]
            raw = np.ascontiguousarray(array[box]).tobytes()
            assert len(raw) == c.extents.length[row]
            at = int(c.extents.offset[row])
            files[int(c.extents.file[row])][at : at + len(raw)] = raw
        small = dict(destination.all_small())
        content = zip(c.files, files, strict=True)
        for name, data in ({f.path: bytes(d) for f, d in content} | small).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)

    return write


WATCHED = {"import", "open", "exec", "compile", "os", "subprocess", "socket", "ctypes", "shutil"}


class Audit:
    """What the interpreter was asked to do while `watching`: imports, files, processes, sockets."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.watching and event.partition(".")[0] in WATCHED:
            self.seen.append((event, args[0] if args else None))


@pytest.fixture(scope="session")
def audit() -> Audit:
    """The audit hook of this process; set `watching`, then look at `seen`."""
    hook = Audit()
    sys.addaudithook(hook)
    return hook
