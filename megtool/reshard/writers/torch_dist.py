"""torch.distributed checkpoints: Megatron's, with the optimizer as it is asked for, and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megtool.checkpoint.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.checkpoint.formats.save_folder import folder_name
from megtool.checkpoint.formats.torch_dist_layout import lay_out as lay_out_ranks
from megtool.checkpoint.megatron_metadata import divisible_by
from megtool.checkpoint.param_groups import BY_DP, read_groups
from megtool.checkpoint.rechunk import regroup
from megtool.config import ParallelConfig
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.sharding import shard
from megtool.dtypes import DType
from megtool.errors import MappingError
from megtool.reshard.fp8_state.transfer import States
from megtool.reshard.megatron.bridge_files import at_layout, bridge_files
from megtool.reshard.megatron.checkpoint_objects import carried_objects, written_objects
from megtool.reshard.megatron.common_state import (
    account_for_common,
    common_state,
    saved_iteration,
)
from megtool.reshard.megatron.dp_reshardable_writer import (
    lay_out_buckets,
    objects_of,
    regrouping_of,
)
from megtool.reshard.megatron.extra_state_names import asked_for
from megtool.reshard.megatron.nemo_config import BRIDGE_FILE
from megtool.reshard.megatron.optimizer import (
    registration_order,
    require_states,
    run_of,
    states_of,
    warn_of_order,
)
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.source import files_beside_ranks
from megtool.reshard.writers.target_spec import Request, Target
from megtool.tensors.sharded import GlobalTensor, Shards, widest


def lay_out(source: CheckpointSource, request: Request, out: Target, dtype: DType | None) -> None:
    """Lay out one data file per rank, the objects, and the files beside them."""
    parallel = out.parallel or ParallelConfig()
    megatron = out.format == "torch_dist"
    if megatron and request.optimizer == BY_DP and states_of(out.side):
        _lay_out_by_buckets(source, request, out, dtype, parallel)
        return
    shards = out.side.shards
    if shards is None:
        shards = rows_over_ranks(out.side.tensors, parallel.dp)
    _lay_out(source, request, out, dtype, parallel, out.side.tensors, shards, {})


def _lay_out(
    source: CheckpointSource,
    request: Request,
    out: Target,
    dtype: DType | None,
    parallel: ParallelConfig,
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    more: dict[str, Any],
) -> None:
    """Everything, for stored tensors and shards that are settled; `more` are further objects."""
    megatron = out.format == "torch_dist"
    num_files = max(parallel.world_size, int(shards.owner.max(initial=0)) + 1)
    small = files_beside_ranks(source, dtype, () if megatron else (f"{MODELOPT_FOLDER}/",))
    if megatron and BRIDGE_FILE in small:
        small[BRIDGE_FILE] = at_layout(small[BRIDGE_FILE], parallel)
    carried = carried_objects(source, tensors, parallel, out.format)
    states = States(source, carried, request.amax, mix=_mix(source, parallel) if megatron else 1)
    if megatron:
        states.settle(asked_for(tensors, ()))
        out.amax = states.report()
    objects: dict[str, Any] = more | written_objects(
        source, carried, tensors, megatron=megatron, nothing=states.nothing()
    )
    iteration = saved_iteration(source.catalogue)
    common = None
    if megatron:
        common = common_state(
            source, parallel, out.side.tensors, dtype, request.optimizer, objects=objects
        )
    out.account(carried.moved, carried.derived, carried.dropped)
    out.account(*account_for_common(source, common, out.format))
    if request.bridge:
        small |= _bridge_files(source, out, parallel, small, iteration)
    out.destination = lay_out_ranks(
        tensors,
        shards,
        num_files=num_files,
        objects=objects,
        common=common,
        iteration=iteration,
        small=small,
        core_version=request.core_version,
        key_paths=source.catalogue.metadata.get("planner_data"),
        megatron=megatron,
    )
    if megatron:
        out.sidecar_folder = folder_name(iteration)


def _mix(source: CheckpointSource, parallel: ParallelConfig) -> int:
    """The experts that share one FP8 state on each rank of the run that will load it."""
    config = source.model.config if source.model else None
    if config is None or not registration_order(source.catalogue).grouped_experts:
        return 1
    return max(config.num_experts // parallel.ep, 1)


def _bridge_files(
    source: CheckpointSource,
    out: Target,
    parallel: ParallelConfig,
    have: dict[str, bytes],
    iteration: int | None,
) -> dict[str, bytes]:
    """What Megatron-Bridge wants beside the data.

    Raises:
        MappingError: nothing says what the model is.
    """
    if source.model is None:
        raise MappingError(
            "run_config.yaml needs the model's configuration",
            file=source.path,
            hint="--like HF_FOLDER gives it",
        )
    weights = [t.dtype.name for t in out.side.tensors if not is_optimizer_state(t.name)]
    return bridge_files(
        source.model.config,
        parallel,
        dtype=max(set(weights), key=weights.count, default="bfloat16"),
        divisible_by=divisible_by(source.catalogue),
        iteration=iteration,
        has_optimizer=bool(states_of(out.side)),
        have=have,
    )


def _lay_out_by_buckets(
    source: CheckpointSource,
    request: Request,
    out: Target,
    dtype: DType | None,
    parallel: ParallelConfig,
) -> None:
    """Weights as tensors, their optimizer state in buckets."""
    config = source.model.config if source.model else None
    if config is None:
        raise MappingError(
            "buckets need the model's configuration",
            file=source.path,
            hint="--like HF_FOLDER gives it; --optimizer fully_reshardable does without",
        )
    weights = [t for t in out.side.tensors if not is_optimizer_state(t.name)]
    run = run_of(source, parallel, weights)
    warn_of_order(source.catalogue, run.order)
    groups = read_groups(source.catalogue)
    laid = lay_out_buckets(weights, states_of(out.side), config, parallel, run)
    prefixes = {s: f"optimizer.state.{s}." for s in states_of(out.side)}
    require_states(out.side, (prefixes[s] + p.key for numbers, p, _ in laid.slots for s in numbers))
    stored = [*weights, *laid.tensors]
    cut = shard(weights, parallel, config=config)
    shards = _joined(cut, laid.ranges, len(weights), max(widest(stored), 1))
    inner = groups.for_chain(laid.num_chains) if groups else [{}] * laid.num_chains
    more = objects_of(laid, run, inner)
    _lay_out(source, request, out, dtype, parallel, stored, shards, more)
    regrouping, names = regrouping_of(laid, shards, len(weights), prefixes)
    flat = {t.name for t in laid.tensors}
    destination = out.destination
    out.destination = replace(
        destination,
        catalogue=regroup(destination.catalogue, lambda n: n not in flat, regrouping),
    )
    out.store_under(names)


def _joined(
    cut: Shards, ranges: Sequence[Sequence[tuple[int, int, int]]], first: int, ndim: int
) -> Shards:
    """Shards of the weights, then those of the flat tensors."""
    rows = [
        (int(t), lo, hi, int(owner))
        for t, lo, hi, owner in zip(
            cut.tensor.tolist(),
            cut.boxes.lo.tolist(),
            cut.boxes.hi.tolist(),
            cut.owner.tolist(),
            strict=True,
        )
    ]
    flat = [
        (first + number, [a], [b], owner)
        for number, found in enumerate(ranges)
        for a, b, owner in found
    ]
    return Shards.build([*rows, *flat], ndim)


def rows_over_ranks(tensors: Sequence[GlobalTensor], ranks: int) -> Shards:
    """Cut each tensor's first dimension as torch's fully sharded data parallel does: `ranks` near
    equal chunks, the last ones possibly empty; 0-d tensors belong to rank 0."""
    rows = []
    for number, t in enumerate(tensors):
        zeros = [0] * len(t.shape)
        if not t.shape or not t.numel:
            rows.append((number, zeros, list(t.shape), 0))
            continue
        step = math.ceil(t.shape[0] / ranks)
        for rank, start in enumerate(range(0, t.shape[0], step)):
            end = min(start + step, t.shape[0])
            rows.append((number, [start, *zeros[1:]], [end, *t.shape[1:]], rank))
    return Shards.build(rows, widest(tensors))
