"""torch.distributed checkpoints: Megatron's `torch_dist`, and plain `dcp`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import DType
from megtool.errors import MappingError
from megtool.formats.auxiliary_files import MODELOPT_FOLDER
from megtool.formats.save_folder import folder_name
from megtool.formats.torch_dist.layout import MegatronSave
from megtool.formats.torch_dist.layout import plan_torch_dist_layout as lay_out_ranks
from megtool.fp8_state.transfer import ExtraStateTransfer, resolve_amax
from megtool.megatron_state.bridge_files import edit_layout, make_bridge_files
from megtool.megatron_state.extra_states.names import list_required_states
from megtool.megatron_state.nemo_config import BRIDGE_FILE
from megtool.megatron_state.param_groups import DP_RESHARDABLE
from megtool.megatron_state.saved_objects import vocab_divisor
from megtool.options.layout import ParallelConfig
from megtool.options.target import TargetOptions
from megtool.reshard.writers.target_spec import AddedState, Target
from megtool.run_state.checkpoint_objects import encode_objects, plan_objects
from megtool.run_state.common_state import (
    account_for_common,
    make_common_state,
    read_iteration,
)
from megtool.run_state.optimizer import (
    choose_bucket_settings,
    find_registration_order,
    find_state_dtypes,
    require_states,
    warn_unknown_order,
)
from megtool.run_state.state_dict_groups import make_group_entries, read_any_groups
from megtool.source.checkpoint import CheckpointSource, collect_small_files
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.transport.rechunk import rechunk


def plan_layout(
    source: CheckpointSource, options: TargetOptions, out: Target, dtype: DType | None
) -> None:
    """Plan one data file per rank, the objects, and the small files."""
    parallel = out.parallel or ParallelConfig()
    megatron = out.format == "torch_dist"
    if megatron and out.optimizer_format == DP_RESHARDABLE and find_state_dtypes(out.side):
        _plan_bucket_layout(source, options, out, dtype, parallel)
        return
    shards = out.side.shards
    if shards is None:
        shards = shard_rows(out.side.tensors, parallel.dp)
    tensors = [*out.side.tensors]
    if out.added.tensors:
        tensors += out.added.tensors
        whole = [((0,) * len(t.shape), t.shape) for t in out.added.tensors]
        shards = _join_shards(shards, [[(lo, hi, 0)] for lo, hi in whole], tensors)
    _plan_layout(source, options, out, dtype, parallel, tensors, shards)


def _plan_layout(
    source: CheckpointSource,
    options: TargetOptions,
    out: Target,
    dtype: DType | None,
    parallel: ParallelConfig,
    tensors: Sequence[GlobalTensor],
    shards: Shards,
) -> None:
    """Plan all files for stored tensors and their shards, with what `out.added` has."""
    added = out.added
    megatron = out.format == "torch_dist"
    num_files = max(parallel.world_size, int(shards.owner.max(initial=0)) + 1)
    small = collect_small_files(source, dtype, () if megatron else (f"{MODELOPT_FOLDER}/",))
    small |= added.small_files
    if megatron and BRIDGE_FILE in small:
        small[BRIDGE_FILE] = edit_layout(small[BRIDGE_FILE], parallel)
    carried = plan_objects(source, tensors, parallel, out.format)
    transfer = ExtraStateTransfer(
        source,
        carried,
        resolve_amax(options),
        experts_per_rank=_count_joined_experts(source, parallel) if megatron else 1,
    )
    if megatron:
        transfer.convert(list_required_states(tensors, ()))
        out.amax = transfer.report()
    objects: dict[str, Any] = encode_objects(
        source, carried, tensors, megatron=megatron, empty_state=transfer.empty_state()
    )
    objects |= added.objects
    iteration = read_iteration(source.catalogue)
    save = None
    entries = {} if megatron else make_group_entries(source.catalogue, tensors)
    objects |= {name: value for name, (_, value) in entries.items()}
    key_paths = dict(source.catalogue.metadata.get("planner_data") or {})
    key_paths |= {name: path for name, (path, _) in entries.items()}
    if megatron:
        save = MegatronSave(
            common=make_common_state(
                source,
                parallel,
                out.side.tensors,
                dtype,
                out.optimizer_format,
                objects=objects,
                config=out.side.config,
            ),
            iteration=iteration,
            core_version=options.core_version,
        )
    out.account(carried.moved, carried.derived, carried.dropped)
    common = None if save is None else save.common
    out.account(*account_for_common(source, common, out.format, has_groups=bool(entries)))
    if options.bridge:
        small |= _make_bridge_files(source, out, parallel, small, iteration)
    out.destination = lay_out_ranks(
        tensors,
        shards,
        num_files=num_files,
        objects=objects,
        small_files=small,
        key_paths=key_paths,
        megatron=save,
    )
    if megatron:
        out.sidecar_folder = folder_name(iteration)


def _count_joined_experts(source: CheckpointSource, parallel: ParallelConfig) -> int:
    """The number of experts whose FP8 states are joined on each rank of the run that loads it."""
    config = source.model.config if source.model else None
    if config is None or not find_registration_order(source.catalogue).grouped_experts:
        return 1
    return max(config.moe.num_experts // parallel.ep, 1)


def _make_bridge_files(
    source: CheckpointSource,
    out: Target,
    parallel: ParallelConfig,
    existing: dict[str, bytes],
    iteration: int | None,
) -> dict[str, bytes]:
    """The files that Megatron-Bridge needs with the data.

    Raises:
        MappingError: the model is not known.
    """
    if source.model is None:
        raise MappingError(
            "run_config.yaml needs the model's configuration",
            file=source.path,
            hint="--like HF_FOLDER gives it",
            error_id="no-model-config",
        )
    weights = [t.dtype.name for t in out.side.tensors if not is_optimizer_state(t.name)]
    return make_bridge_files(
        out.side.config or source.model.config,
        parallel,
        dtype=max(set(weights), key=weights.count, default="bfloat16"),
        divisible_by=vocab_divisor(source.catalogue),
        iteration=iteration,
        has_optimizer=bool(find_state_dtypes(out.side)),
        existing=existing,
    )


def _plan_bucket_layout(
    source: CheckpointSource,
    options: TargetOptions,
    out: Target,
    dtype: DType | None,
    parallel: ParallelConfig,
) -> None:
    """Plan weights as tensors and their optimizer state in buckets."""
    from megtool.megatron_state.optimizer.dp_reshardable_writer import (
        make_bucket_objects,
        plan_buckets,
        plan_regrouping,
    )

    config = out.side.config or (source.model.config if source.model else None)
    if config is None:
        raise MappingError(
            "buckets need the model's configuration",
            file=source.path,
            hint="--like HF_FOLDER gives it; --optimizer-format fully_reshardable does not need it",
            error_id="no-model-config",
        )
    weights = [t for t in out.side.tensors if not is_optimizer_state(t.name)]
    settings = choose_bucket_settings(source, parallel, weights)
    warn_unknown_order(source.catalogue, settings.order)
    groups = read_any_groups(source.catalogue)
    layout = plan_buckets(weights, find_state_dtypes(out.side), config, parallel, settings)
    prefixes = {s: f"optimizer.state.{s}." for s in find_state_dtypes(out.side)}
    require_states(
        out.side, (prefixes[s] + p.key for numbers, p, _ in layout.slots for s in numbers)
    )
    stored = [*weights, *layout.tensors]
    weight_shards = shard(weights, parallel, config=config)
    flat_boxes = [[((a,), (b,), owner) for a, b, owner in ranges] for ranges in layout.ranges]
    shards = _join_shards(weight_shards, flat_boxes, stored)
    inner = groups.for_chain(layout.num_chains) if groups else [{}] * layout.num_chains
    out.added = AddedState(objects=make_bucket_objects(layout, settings, inner))
    _plan_layout(source, options, out, dtype, parallel, stored, shards)
    regrouping, names = plan_regrouping(layout, shards, len(weights), prefixes)
    flat = {t.name for t in layout.tensors}
    destination = out.destination
    out.destination = replace(
        destination,
        catalogue=rechunk(destination.catalogue, lambda n: n not in flat, regrouping),
    )
    out.add_copies(names)


def _join_shards(
    shards: Shards,
    further: Sequence[Sequence[tuple[Sequence[int], Sequence[int], int]]],
    tensors: Sequence[GlobalTensor],
) -> Shards:
    """Shards of the first of `tensors`, then the `further` boxes, with their owners, of the last
    ones."""
    rows: list[tuple[int, Sequence[int], Sequence[int], int]] = [
        (int(t), lo, hi, int(owner))
        for t, lo, hi, owner in zip(
            shards.tensor.tolist(),
            shards.boxes.lo.tolist(),
            shards.boxes.hi.tolist(),
            shards.owner.tolist(),
            strict=True,
        )
    ]
    first = len(tensors) - len(further)
    rows += [
        (first + i, lo, hi, owner) for i, boxes in enumerate(further) for lo, hi, owner in boxes
    ]
    return Shards.build(rows, max(widest(tensors), 1))


def shard_rows(tensors: Sequence[GlobalTensor], ranks: int) -> Shards:
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
