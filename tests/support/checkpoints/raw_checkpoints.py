"""Checkpoints as raw files: any tensors, cut anywhere, with nothing else around them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards, widest


def random_grid(rng: random.Random, shape: Sequence[int], files: int) -> list[tuple]:
    """Boxes `(lo, hi, file)` that tile a shape, cut at random places."""
    cuts = []
    for n in shape:
        inner = sorted(
            rng.sample(range(1, n), min(rng.choice([0, 0, 1, 2]), n - 1)) if n > 1 else []
        )
        edges = [0, *inner, n]
        cuts.append(list(itertools.pairwise(edges)))
    return [
        ([a for a, _ in box], [b for _, b in box], rng.randrange(files))
        for box in itertools.product(*cuts)
    ]


def lay_out(
    root: Path,
    tensors: Sequence[GlobalTensor],
    grids: Sequence[Sequence[tuple]],
    *,
    header: int = 16,
    align: int = 1,
) -> Catalogue:
    """A catalogue of raw files: after `header` bytes, shards one after the other."""
    rows = [(t, lo, hi, file) for t, grid in enumerate(grids) for lo, hi, file in grid]
    shards = Shards.build(rows, widest(tensors))
    end = dict.fromkeys(sorted({int(f) for f in shards.owner}) or [0], header)
    offset = np.zeros(len(shards), np.int64)
    item = np.array([t.dtype.itemsize for t in tensors], np.int64)
    length = shards.boxes.volume() * item[shards.tensor]
    for i, (file, n) in enumerate(zip(shards.owner.tolist(), length.tolist(), strict=True)):
        offset[i] = -(-end[file] // align) * align
        end[file] = int(offset[i]) + n
    files = [StoredFile(path=f"part-{f}.bin", size=end.get(f, 0)) for f in range(max(end) + 1)]
    extents = Extents(file=shards.owner, offset=offset, length=length)
    return Catalogue(
        format="raw", root=root, files=files, tensors=list(tensors), shards=shards, extents=extents
    )


def write(catalogue: Catalogue, arrays: Mapping[str, np.ndarray]) -> None:
    """Write whole stored tensors into the files of a catalogue, and note the files' times."""
    catalogue.root.mkdir(parents=True, exist_ok=True)
    data = [bytearray(f.size) for f in catalogue.files]
    for i, tensor in enumerate(catalogue.shards.tensor.tolist()):
        array = arrays[catalogue.tensors[tensor].name]
        raw = np.ascontiguousarray(array[box(catalogue, i, array.ndim)]).tobytes()
        at = int(catalogue.extents.offset[i])
        data[int(catalogue.extents.file[i])][at : at + len(raw)] = raw
    for file, content in zip(catalogue.files, data, strict=True):
        (catalogue.root / file.path).write_bytes(content)
    catalogue.files[:] = [StoredFile.stat(catalogue.root, f.path) for f in catalogue.files]


def read(catalogue: Catalogue, root: Path) -> dict[str, np.ndarray]:
    """Whole stored tensors out of files that lie below `root`."""
    out = {t.name: np.zeros(t.shape, t.dtype.view) for t in catalogue.tensors}
    for i, tensor in enumerate(catalogue.shards.tensor.tolist()):
        array = out[catalogue.tensors[tensor].name]
        where = box(catalogue, i, array.ndim)
        path = root / catalogue.files[int(catalogue.extents.file[i])].path
        at = int(catalogue.extents.offset[i])
        raw = path.read_bytes()[at : at + array[where].nbytes]
        array[where] = np.frombuffer(raw, array.dtype).reshape(array[where].shape)
    return out


def box(catalogue: Catalogue, shard: int, ndim: int) -> tuple[slice, ...]:
    lo, hi = catalogue.shards.boxes.lo[shard, :ndim], catalogue.shards.boxes.hi[shard, :ndim]
    return tuple(slice(int(a), int(b)) for a, b in zip(lo, hi, strict=True))


def put(p: Placement, canonical: np.ndarray, stored: np.ndarray) -> None:
    """Write a canonical tensor into a stored one, index by index."""
    index = np.indices(p.shape).reshape(len(p.shape), canonical.size)
    where = [np.full(index.shape[1] if p.shape else 1, b) for b in p.base]
    for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):
        where[d] = where[d] + index[j] * m
    stored[tuple(where)] = canonical.reshape(-1) if where else canonical.reshape(())


def destination(catalogue: Catalogue, **more: object) -> Destination:
    """A destination of raw files, with a header in each."""
    headers = [(f, 0, bytes([f % 251]) * 16) for f, x in enumerate(catalogue.files) if x.size >= 16]
    return Destination(catalogue=catalogue, fragments=headers, **more)
