"""The local shard of a parameter that torch's `fully_shard` has sharded over replicas."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank has a part of a tensor alone."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a tensor itself; both without a gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard.detach()


def with_local_shard(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor that is sharded as another one, with another local shard."""
    sharded: DTensor = DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return sharded


def shard_box(tensor: DTensor) -> tuple[int, int, int]:
    """The dim that a DTensor is sharded along, and the first and the last index of the local shard,
    exclusive.

    Shards are chunks as `torch.chunk` makes them, along one axis of the mesh; those of other axes
    are the same. One is empty where there are fewer rows than ranks.
    """
    axis, placement = next((i, p) for i, p in enumerate(tensor.placements) if isinstance(p, Shard))
    size = tensor.shape[placement.dim]
    each = -(-size // tensor.device_mesh.size(axis))
    low = min(tensor.device_mesh.get_local_rank(axis) * each, size)
    return placement.dim, low, min(low + each, size)


def own_shard(whole: Tensor, tensor: DTensor) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor of the same shape."""
    dim, low, high = shard_box(tensor)
    return whole.narrow(dim, low, high - low)


def shard_ranges(tensor: DTensor) -> list[tuple[int, int]]:
    """The ranges [start, stop) of a flattened tensor that its local shard has, in order."""
    dim, low, high = shard_box(tensor)
    size, inner = tensor.shape[dim], prod(tensor.shape[dim + 1 :])
    starts = [row * size * inner for row in range(prod(tensor.shape[:dim]))]
    return [(start + low * inner, start + high * inner) for start in starts]
