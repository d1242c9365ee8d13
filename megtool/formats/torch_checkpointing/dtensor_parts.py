"""Which part of a tensor a rank's DTensor is: its mesh and placements say it in the pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.formats.torch_checkpointing.metadata import RankPart
from megtool.pickles.reader import Inert, to_plain

_MAX_MESH_DIMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorPlacement:
    """Where a rank stands in the mesh of a DTensor, and which dim each mesh dim cuts.

    `cut_dims` has None for a mesh dim over which the tensor is replicated.
    """

    coordinate: tuple[int, ...]
    cut_dims: tuple[int | None, ...]


def read_placement(spec: Any, num_dims: int) -> DTensorPlacement | None:
    """Return the placement in a pickled `DTensorSpec`; None where it is not understood.

    Partial sums and the strided shards of FSDP over tensor parallelism are not.
    """
    fields = _state(spec)
    mesh = _state(fields.get("mesh"))
    coordinate = to_plain(mesh.get("_coordinate_on_dim"))
    placements = fields.get("placements")
    if not isinstance(coordinate, list | tuple) or not isinstance(placements, tuple):
        return None
    if not len(coordinate) == len(placements) <= _MAX_MESH_DIMS:
        return None
    if any(type(n) is not int or n < 0 for n in coordinate):
        return None
    cut_dims: list[int | None] = []
    for placement in placements:
        name = placement.name if isinstance(placement, Inert) else ""
        if name.rpartition(".")[2] == "Replicate":
            cut_dims.append(None)
            continue
        dim = _state(placement).get("dim")
        is_shard = name.startswith("torch.distributed.") and name.rpartition(".")[2] == "Shard"
        if not is_shard or type(dim) is not int or not -num_dims <= dim < num_dims:
            return None
        cut_dims.append(dim % num_dims)
    return DTensorPlacement(coordinate=tuple(coordinate), cut_dims=tuple(cut_dims))


def cut_dtensor(
    shape: Sequence[int], placements: Mapping[int, DTensorPlacement]
) -> tuple[RankPart, ...] | None:
    """Return the parts of a tensor that ranks hold; None if their meshes contradict each other.

    A mesh dim cuts as `torch.chunk` does: into parts of equal size, of which the last may be
    smaller or empty. Source: `Shard._split_tensor` of torch.distributed.tensor.
    """
    first = next(iter(placements.values()))
    if any(p.cut_dims != first.cut_dims for p in placements.values()):
        return None
    num_ranks = [
        1 + max(p.coordinate[d] for p in placements.values()) for d in range(len(first.cut_dims))
    ]
    parts = []
    for rank, placement in placements.items():
        low, high = [0] * len(shape), list(shape)
        for position, dim, size in zip(
            placement.coordinate, first.cut_dims, num_ranks, strict=True
        ):
            if dim is None:
                continue
            extent = high[dim] - low[dim]
            chunk = -(-extent // size)
            start = low[dim] + min(position * chunk, extent)
            low[dim], high[dim] = start, min(start + chunk, high[dim])
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        is_empty = 0 in sizes
        window = tuple(low), tuple(high), (0,) * len(shape)
        parts.append(RankPart(rank=rank, shape=sizes, windows=() if is_empty else (window,)))
    return tuple(parts)


def _state(node: Any) -> Mapping[str, Any]:
    if not isinstance(node, Inert):
        return {}
    states = node.state if isinstance(node.state, tuple) else (node.state,)
    return {k: v for s in states if isinstance(s, dict) for k, v in s.items() if isinstance(k, str)}
