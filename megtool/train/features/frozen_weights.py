"""The weights of a frozen model: as savers read them, and their fingerprint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megtool.model.layers.param_attributes import is_marked
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import adapters_of, merged_weight
from megtool.model.stacks.unpacked_forward import made_weights
from megtool.parallel.collectives import all_sum
from megtool.tensors.dtensor_shards import is_sharded, local_shard, shard_box

DRAFT_HEAD = "eagle"
"""The module of a stage that holds a draft head."""
_ADDED = re.compile(rf"(?:.*\.adapter|{DRAFT_HEAD})\..*")
"""Parameters that a feature has added to a model, by name."""
_CUT = "tensor_model_parallel"
_CHUNK = 1 << 24
"""Elements of a weight that are in memory as float64 at a time."""


def is_added(name: str) -> bool:
    """Whether a parameter of a stage is none of the model's own."""
    return _ADDED.fullmatch(name) is not None


class MergedStage:
    """A stage with adapters merged into its weights, as a saver reads it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.groups, self.dtype, self.modules = decoder.groups, decoder.dtype, decoder.modules

    @property
    def computed(self) -> Mapping[str, Callable[[], Tensor]]:
        """The weights that no module has as they are saved: packed ones, and those with adapters
        merged, where ranks have no shards of them."""
        tensors, weights = self._makers(keep_vars=True), self._decoder.state_dict(keep_vars=True)
        names = {f"{name}.weight" for name, _, _ in adapters_of(self._decoder)}
        names = {n for n in names if not (n in weights and is_sharded(weights[n]))}
        return {name: tensors[name] for name in {*made_weights(self._decoder), *names}}

    def state_dict(self, *, keep_vars: bool = False) -> Mapping[str, Tensor]:
        """Parameters under the names of a model without adapters, merged when they are read."""
        return LazyTensors(self._makers(keep_vars=keep_vars))

    def _makers(self, *, keep_vars: bool) -> dict[str, Callable[[], Tensor]]:
        adapters = {f"{n}.weight": (x, a) for n, x, a in adapters_of(self._decoder)}
        packed = made_weights(self._decoder)
        tensors = self._decoder.state_dict(keep_vars=keep_vars)
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, tensor in tensors.items():
            if not is_added(name):
                weight = packed.get(name, _constant(tensor))
                pair = adapters.get(name)
                makers[name] = weight if pair is None else _merge_fn(*pair, weight)
        return makers


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _merge_fn(linear: Any, adapter: Any, weight: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: merged_weight(linear, adapter, weight().detach())


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are computed each time they are read."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors, one at a time."""
        return ItemsView(self)


@torch.no_grad()
def fingerprint_frozen_weights(stages: Sequence[Decoder]) -> tuple[float, float]:
    """A number that depends on all frozen weights and their positions and is the same for every
    layout, and the sum of magnitudes; every rank calls it.

    Elements are summed with factors that depend on the parameter's name, and on the position along
    dimensions that no layout splits.
    """
    groups = stages[0].groups
    total = torch.zeros(2, dtype=torch.float64, device=groups.device)
    for decoder in stages:
        packed = made_weights(decoder)
        for name, p in decoder.named_parameters():
            is_expert, is_cut = not is_marked(p, "allreduce"), is_marked(p, _CUT)
            replicas, instances, shards = groups.replicas, groups.instances, groups.tp
            if is_expert:
                replicas, shards = groups.expert_dp, groups.etp
                instances = groups.expert_instances
            copies = instances if is_sharded(p) else replicas
            if copies.rank or (shards.rank and not is_cut) or is_marked(p, "shared"):
                continue
            if not is_added(name):
                digest = hashlib.sha256(name.encode()).digest()
                # Marks of experts tell how this layout splits them; another may do it differently.
                along = int(getattr(p, "partition_dim", -1))  # -1: along none
                cut = range(p.dim()) if is_expert else [along]
                weight = packed[name]() if name in packed else p
                total += _weighted_sum(weight, cut) * (
                    0.5 + int.from_bytes(digest[:4], "little") / 2**32
                )
    value, room = all_sum(total, groups.world).tolist()
    return value, room


def _weighted_sum(p: Tensor, cut: Iterable[int]) -> Tensor:
    """The sum of a parameter's elements with factors by position, and that of magnitudes."""
    starts = [0] * p.dim()
    if isinstance(p, DTensor):
        dim, starts[dim], _ = shard_box(p)
        p = local_shard(p)
    factors = [
        torch.ones(n, dtype=torch.float64, device=p.device)
        if d in cut
        else 0.5
        + torch.arange(start, start + n, device=p.device).mul(2654435761).remainder(2**32) / 2**32
        for d, (n, start) in enumerate(zip(p.shape, starts, strict=True))
    ]
    *outer, inner = factors
    by_row = torch.ones(1, dtype=torch.float64, device=p.device)
    for factor in outer:
        by_row = torch.outer(by_row, factor.double()).flatten()
    total = torch.zeros(2, dtype=torch.float64, device=p.device)
    rows = max(1, _CHUNK // max(inner.numel(), 1))
    by_inner = p.reshape(by_row.numel(), -1)
    for start in range(0, by_row.numel(), rows):
        weights, wide = by_row[start : start + rows], by_inner[start : start + rows].double()
        total[0] += weights @ (wide @ inner.double())
        total[1] += weights @ (wide.abs_() @ inner.double())
    return total
