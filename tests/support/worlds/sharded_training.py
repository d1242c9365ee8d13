"""Tiny decoders whose parameters torch's `fully_shard` has sharded, trained on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import FullyShard, sharded_modules
from megtool.model.stacks.recompute import recompute
from megtool.optim.config import OptimizerConfig
from megtool.optim.fully_sharded import FullyShardedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.dtensor_shards import local_shard
from tests.support.worlds.optimizer_layouts import Curve, named, stages_of, take_steps

ZERO_2, ZERO_3 = "optim_grads", "optim_grads_params"


def make_sharded(
    name: str,
    groups: ProcessGroups,
    strategy: str,
    *,
    settings: OptimizerConfig,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    granularity: Any = None,
) -> tuple[list[Decoder], FullyShardedOptimizer]:
    """The stages of a rank, sharded, and their optimizer."""
    stages = stages_of(name, groups, sequence_parallel=sequence_parallel, dtype=dtype)
    sharder = FullyShard(groups=groups, reshard_after_forward=strategy == ZERO_3)
    for stage in stages:
        sharder.shard_layers(stage)
        sharder.shard_rest(stage)
    if granularity is not None:
        recompute(stages, granularity)
    modules = sharded_modules(stages)
    return stages, FullyShardedOptimizer(named(stages), settings, groups, modules=modules)


def train_sharded(
    name: str,
    groups: ProcessGroups,
    strategy: str,
    *,
    steps: int,
    microbatches: int,
    settings: OptimizerConfig,
    **how: Any,
) -> Curve:
    """The curve of a run; its parameters are whole, as this rank's tensor parallelism has them."""
    stages, optimizer = make_sharded(name, groups, strategy, settings=settings, **how)
    curve = take_steps(stages, optimizer, groups, range(steps), microbatches)
    curve.parameters = {key: whole_tensor(p) for key, p in named(stages)}
    return curve


def whole_tensor(p: Tensor) -> Tensor:
    """A parameter gathered from all ranks that share it out."""
    with torch.no_grad():
        full: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()  # type: ignore[operator]
    return full.clone()


def held_bytes(stages: list[Decoder], optimizer: FullyShardedOptimizer) -> dict[str, int]:
    """Bytes that this rank has between steps, of parameters, gradients and optimizer state."""
    parameters = [p for _, p in named(stages)]
    out = {
        "parameters": [local_shard(p) for p in parameters],
        "gradients": [local_shard(p.grad) for p in parameters if p.grad is not None],
        "state": [t for s in optimizer.segments for t in s.states.values()],
    }
    return {kind: sum(t.nbytes for t in tensors) for kind, tensors in out.items()}
