"""Plan optimizer state in Megatron's default format, `dp_reshardable`.

It has one flat tensor per bucket, state and data-parallel group. Buckets have to be cut as the run
that loads them cuts its own: Megatron compares their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megtool.convert.megatron.rank_parameters import (
    Parameter,
    RankPlace,
    each_once,
    of_tensor_rank,
    rank_parameters,
)
from megtool.convert.megatron.sharding import is_beside_text
from megtool.dtypes import DType
from megtool.errors import LayoutError
from megtool.megatron_state.optimizer.box_runs import BoxRunCollector, split_into_boxes
from megtool.megatron_state.optimizer.dp_reshardable import is_module_buffer
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import Mesh
from megtool.pickles.reader import inert_global
from megtool.spec.model_config import ModelConfig
from megtool.tensors import buckets
from megtool.tensors.buckets import BucketSettings
from megtool.tensors.registration_order import registered
from megtool.tensors.sharded import GlobalTensor, Shards
from megtool.transport.rechunk import Rechunking

_PREFIX = "optimizer.distributed.dp_group_idx_"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Planned buckets: flat tensors, their shards, and the places of each parameter's state.

    `slots` are `(stored tensor of each state, parameter, start in it)`. `sizes` are, for every
    data-parallel group of a chain, the padded and unpadded bucket sizes of every buffer.
    """

    tensors: list[GlobalTensor] = field(default_factory=list)
    ranges: list[list[tuple[int, int, int]]] = field(default_factory=list)
    slots: list[tuple[dict[str, int], Parameter, int]] = field(default_factory=list)
    sizes: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = field(default_factory=dict)
    num_chains: int = 1


def plan_buckets(
    weights: Sequence[GlobalTensor],
    states: Mapping[str, DType],
    config: ModelConfig,
    parallel: ParallelConfig,
    settings: BucketSettings,
) -> BucketPlan:
    """Buckets of all ranks for a model's weights (under Megatron's names).

    `states` are the states to store, by stored name, and their dtypes. Experts that are spread over
    ranks have their own buffers, in another chain. Towers, which are frozen, have no state.

    Raises:
        LayoutError: buckets cannot hold experts at this layout.
    """
    weights = each_once(
        [t for t in weights if not (is_module_buffer(t.name) or is_beside_text(t.name))]
    )
    ranks = rank_parameters(weights, config, parallel)
    has_expert_chain = parallel.ep > 1 and any(
        p.is_expert for parameters in ranks.values() for p in parameters
    )
    if not has_expert_chain and config.moe.num_experts and parallel.tp % parallel.etp:
        raise LayoutError(
            f"etp={parallel.etp} with tp={parallel.tp} and ep=1: buckets hold experts among the "
            "dense parameters of their tensor ranks",
            hint=f"--etp {parallel.tp} or a divisor of it, or --optimizer-format fully_reshardable",
        )
    layout = BucketPlan(num_chains=1 + has_expert_chain)
    for stage in range(parallel.pp):
        for tp in range(parallel.tp):
            group = stage * parallel.tp + tp
            members = [
                [
                    p
                    for p in of_tensor_rank(ranks, parallel, stage, chunk, tp)
                    if not (p.is_expert and has_expert_chain)
                ]
                for chunk in range(parallel.vpp)
            ]
            owners = [_dense_owner(parallel, stage, tp, r) for r in range(_num_replicas(parallel))]
            _plan_group(layout, (0, group), members, states, settings, stage, owners)
    for expert_group in range(parallel.pp * parallel.ep * parallel.etp if has_expert_chain else 0):
        stage, rank_in_stage = divmod(expert_group, parallel.ep * parallel.etp)
        ep, tp = divmod(rank_in_stage, parallel.etp)
        members = [
            [p for p in _parameters_at(ranks, stage, chunk, ep, tp) if p.is_expert]
            for chunk in range(parallel.vpp)
        ]
        owners = [
            _expert_owner(parallel, stage, ep, tp, r) for r in range(max(parallel.expert_dp, 1))
        ]
        _plan_group(layout, (1, expert_group), members, states, settings, stage, owners)
    return layout


def _parameters_at(
    ranks: Mapping[RankPlace, list[Parameter]], stage: int, chunk: int, ep: int, tp: int
) -> list[Parameter]:
    return ranks.get(RankPlace(stage, chunk, ep, tp), [])


def _num_replicas(parallel: ParallelConfig) -> int:
    return parallel.dp * parallel.cp


def _dense_owner(parallel: ParallelConfig, stage: int, tp: int, replica: int) -> int:
    dp, cp = divmod(replica, parallel.cp)
    return int(Mesh(parallel).rank(tp=tp, cp=cp, dp=dp, pp=stage))


def _expert_owner(parallel: ParallelConfig, stage: int, ep: int, tp: int, replica: int) -> int:
    return int(Mesh(parallel).expert_rank(etp=tp, ep=ep, edp=replica, pp=stage))


def _plan_group(
    layout: BucketPlan,
    key: tuple[int, int],
    members: Sequence[Sequence[Parameter]],
    states: Mapping[str, DType],
    settings: BucketSettings,
    stage: int,
    owners: Sequence[int],
) -> None:
    """Buffers of one data-parallel group: one per chunk that holds any of its parameters."""
    chain, group = key
    chained = f"chained_{chain}." if layout.num_chains > 1 else ""
    dtypes = f"dtype_(torch.{settings.param_dtype}, torch.{settings.grad_dtype})"
    layout.sizes[key] = []
    for chunk, parameters in enumerate(members):
        if not parameters:  # chunks without such parameters have no buffer and no number
            continue
        order = registered([(p.module_key, p.expert) for p in parameters], settings.order)
        ordered = [parameters[i] for i in order]
        slots, sizes = buckets.lay_out(
            [p.numel for p in ordered],
            [p.is_shared for p in ordered],
            bucket_size=settings.bucket_size if stage == 0 and chunk == 0 else None,
        )
        number = len(layout.sizes[key])
        wide = settings.for_bandwidth
        padded = [buckets.padded(n, len(owners), for_bandwidth=wide) for n in sizes]
        layout.sizes[key].append((padded, sizes))
        buffer = f"{chained}{_PREFIX}{group}.gbuf_idx_{number}.{dtypes}"
        numbers: list[dict[str, int]] = []
        for bucket, size in enumerate(sizes):
            numbers.append({})
            for state, kind in states.items():
                numbers[-1][state] = len(layout.tensors)
                name = f"{buffer}.bucket_idx_{bucket}.{state}"
                layout.tensors.append(GlobalTensor(name=name, shape=(size,), dtype=kind))
                ranges = buckets.local_ranges(size, len(owners), for_bandwidth=wide)
                layout.ranges.append(
                    [(a, b, o) for (a, b), o in zip(ranges, owners, strict=True) if a < b]
                )
        layout.slots.extend(
            (numbers[s.bucket], p, s.start) for p, s in zip(ordered, slots, strict=True)
        )


def plan_regrouping(
    layout: BucketPlan, shards: Shards, first: int, state_names: Mapping[str, str]
) -> tuple[Rechunking, dict[str, list[str]]]:
    """The buckets as tensors of the model's state, and all stored names of each.

    `shards` are all shards of the destination, in which the buckets' tensors are numbered from
    `first`; `state_names` maps a state to the prefix of its tensors' names. A parameter that
    several ranks hold is stored under further names, `NAME#1` and so on.
    """
    collected = BoxRunCollector(repeat=True)
    for numbers, p, start in layout.slots:
        for state, number in numbers.items():
            kind = layout.tensors[number].dtype
            tensor = GlobalTensor(name=state_names[state] + p.key, shape=p.shape, dtype=kind)
            rows = shards.of(first + number)
            for row in range(rows.start, rows.stop):
                lo, hi = int(shards.boxes.lo[row, 0]), int(shards.boxes.hi[row, 0])
                a, b = max(lo, start), min(hi, start + p.numel)
                if a < b:
                    for box, position in split_into_boxes(p, a - start, b - start):
                        collected.add(tensor, box, row, a - lo + position)
    return collected.regrouping(), collected.names


def make_bucket_objects(
    layout: BucketPlan, settings: BucketSettings, inner: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The sharded objects that go with the buckets: sizes, and each group's `inner` state.

    `inner` holds one dict per chain (`optimizer`: param groups; `grad_scaler` where there is one).
    """
    dtypes = (
        inert_global("torch", settings.param_dtype),
        inert_global("torch", settings.grad_dtype),
    )
    out: dict[str, Any] = {}
    for (chain, group), buffers in layout.sizes.items():
        chained = f"chained_{chain}." if layout.num_chains > 1 else ""
        prefix = f"{chained}{_PREFIX}{group}."
        for k, name in enumerate(("per_bucket_numel", "per_bucket_numel_unpadded")):
            out[f"{prefix}{name}/shard_0_1"] = [{dtypes: list(b[k])} for b in buffers]
        for name, value in inner[min(chain, len(inner) - 1)].items():
            out[f"{prefix}{name}/shard_0_1"] = value
    return out
