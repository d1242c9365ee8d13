"""Arrays moved between layouts, and written as checkpoints, element by element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import Placement


def select_stored(array: Any, p: Placement) -> Any:
    """The elements of a stored array that a placement names, in the placement's shape."""
    grids = np.indices(p.shape, sparse=True)
    index = [np.full((1,) * len(p.shape), b) for b in p.base]
    for j, (dim, mult) in enumerate(zip(p.dims, p.mults, strict=True)):
        index[dim] = index[dim] + grids[j] * mult
    return array, tuple(index)


def carry(
    source: Any, arrays: dict[str, Any], target: Any, *, has_shifts: bool = True
) -> dict[str, Any]:
    """Move arrays from a read side to a written one through placements.

    Without `has_shifts` no element is stored plus or less something: gradients are not.
    """
    kind = next(iter(arrays.values())).dtype
    out = {t.name: np.zeros(t.shape, kind) for t in target.tensors}
    writes = {name: np.zeros(a.shape, np.int8) for name, a in out.items()}
    for name, p in target.placements.items():
        q = source.placements[name]
        array, index = select_stored(arrays[q.stored], q)
        value = np.broadcast_to(array[index], q.shape).reshape(p.shape)
        if has_shifts and p.shift != q.shift:
            value = value + kind.type(p.shift - q.shift)
        array, index = select_stored(out[p.stored], p)
        array[index] = value
        np.add.at(writes[p.stored], index, 1)
    for fill in target.fills:
        array, index = select_stored(out[fill.placement.stored], fill.placement)
        array[index] = fill.value
        np.add.at(writes[fill.placement.stored], index, 1)
    for name, count in writes.items():
        assert (count == 1).all(), f"{name} is not written exactly once"
    return out


def materialize(destination: Destination, root: Path, arrays: dict[str, Any]) -> None:
    """Write a destination and the tensors (numpy, in the dtype's view) that belong into it."""
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
    small = dict(destination.iter_small_files())
    content = zip(c.files, files, strict=True)
    for name, data in ({f.path: bytes(d) for f, d in content} | small).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
