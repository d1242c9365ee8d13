"""Megatron's common state of any checkpoint, as a run at the current layout loads it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megtool.access.live_objects import live_value
from megtool.convert.dialects import is_optimizer_state
from megtool.errors import listed
from megtool.megatron_state.model_space import read_saved_layout
from megtool.megatron_state.param_groups import FULLY_RESHARDABLE, SHARDING_TYPE, scalar_value
from megtool.megatron_state.random_state import (
    find_rerun_obstacle,
    find_rng_obstacle,
    is_rerun_object,
    is_rng_object,
)
from megtool.options.layout import ParallelConfig
from megtool.run_state.common_state import make_common_state, read_iteration
from megtool.source.checkpoint import CheckpointSource

_LOG = logging.getLogger(__name__)
_MODEL_SPACE = "fully_sharded_model_space"
_OF_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)/shard_([\d.]+)_([\d.]+)")


def load_common_state(source: CheckpointSource, sharding_type: str | None = None) -> dict[str, Any]:
    """What a checkpoint has beside tensors, as Megatron's common state at the current layout.

    `sharding_type` is the optimizer's, by default the one that any layout loads. A checkpoint
    without optimizer state says so in its args, as a run with `--no-save-optim` does.
    """
    tensors = list(source.view.tensors)
    has_states = any(is_optimizer_state(t.name) for t in tensors)
    kind = sharding_type or (_any_layout() if has_states else None)
    layout = current_layout() or read_saved_layout(source.catalogue)
    objects = _objects_of_ranks(source, layout)
    tree = make_common_state(source, layout, tensors, None, kind, objects=objects)
    left_out: list[str] = []
    state: dict[str, Any] = live_value(tree, "common state", left_out)
    if left_out:
        _LOG.warning("no part of Megatron's state is made of %s", listed(left_out, 20))
    if not isinstance(source.catalogue.metadata.get("iteration"), int):
        state.pop("iteration", None)
    args = state.get("args")
    if args is not None and not has_states:
        args.no_save_optim = args.no_save_rng = True
    _add_common_step(state)
    return state


def _objects_of_ranks(source: CheckpointSource, layout: ParallelConfig) -> list[str]:
    """The random state and rerun state that the ranks of a layout can go on from."""
    catalogue = source.catalogue
    out = []
    for name in catalogue.objects:
        find = find_rng_obstacle if is_rng_object(name) else find_rerun_obstacle
        known = is_rng_object(name) or is_rerun_object(name)
        if known and find(catalogue, name, layout) is None:
            out.append(name)
    return out


def _add_common_step(state: Mapping[str, Any]) -> None:
    """The step where optimizers that are not distributed look for it."""
    optimizer = state.get("optimizer")
    if not isinstance(optimizer, dict) or SHARDING_TYPE in optimizer:
        return
    inner = optimizer.get("optimizer")
    if isinstance(inner, dict) and "state" not in inner:
        steps = [scalar_value(g.get("step")) for g in inner.get("param_groups", ())]
        if steps and steps[0] is not None:
            inner["state"] = {"common_step": torch.tensor(steps[0])}


def _any_layout() -> str:
    """The sharding type of optimizer state that every layout loads, in this version of core."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    known = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", {_MODEL_SPACE})
    return FULLY_RESHARDABLE if FULLY_RESHARDABLE in known else _MODEL_SPACE


def current_layout() -> ParallelConfig | None:
    """The layout of this run, None where it is not initialized."""
    from megatron.core import parallel_state as ps

    if not (dist.is_available() and dist.is_initialized() and ps.model_parallel_is_initialized()):
        return None
    return ParallelConfig(
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=ps.get_virtual_pipeline_model_parallel_world_size() or 0,
        ep=ps.get_expert_model_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        cp=ps.get_context_parallel_world_size(),
        dp=ps.get_data_parallel_world_size(),
    )


def stacked_names(name: str, source: CheckpointSource) -> list[str]:
    """What an object of one layer is called where layers share a key."""
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return []
    layers = source.config.num_layers
    offset, shape = match[4].split(".")[1:], match[5].split(".")[1:]
    place = ".".join([match[2], *offset]), ".".join([str(layers), *shape])
    return [f"{match[1]}{match[3]}/shard_{place[0]}_{place[1]}"]


def is_release(source: CheckpointSource) -> bool:
    """Whether a checkpoint is a model alone, which no iteration of a run saved."""
    return read_iteration(source.catalogue) is None
