"""Estimates of the memory that training takes on a rank, from the model's shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megtool.convert.canonical_view import canonical_side
from megtool.inference.rank_weights import decoder_of
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import is_layer
from megtool.model.stacks.pipeline import build_stages
from megtool.optim.fp8.weights import marked_block
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.train.model.packed_base import PackedBase
from megtool.train.options.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Elements and bytes of the rank that holds most, without activations.

    `adapter_bytes`, those of LoRA's adapters, are a part of `weight_bytes`.
    """

    parameters: int
    trained: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    adapter_bytes: int = 0


def estimate_rank_memory(
    source: CheckpointSource,
    settings: TrainConfig,
    layout: ParallelConfig,
    dtype: str,
    prepare: Callable[[Sequence[Decoder]], None],
) -> RankMemory:
    """Memory of each rank of a model's largest stage.

    `prepare` freezes parameters of stages, or adds some, as the run does.

    Raises:
        LayoutError: the layout does not divide the model; the hint says which sizes do.
        MappingError: it is not a decoder.
    """
    config, _ = decoder_of(source, keeps_mtp=True)
    kind: torch.dtype = getattr(torch, dtype)
    estimates = []
    for stage in range(layout.pp):
        stages = build_stages(
            config,
            meta_groups(layout, stage),
            dtype=kind,
            sequence_parallel=settings.parallel.sequence_parallel,
        )
        prepare(stages)
        measured = _measure_stages(stages, settings, layout, kind)
        if settings.lora.qlora:
            saved = PackedBase(source, stages).saved_bytes
            measured = replace(measured, weight_bytes=measured.weight_bytes - saved)
        estimates.append(measured)
    return max(estimates, key=lambda s: s.weight_bytes + s.gradient_bytes + s.optimizer_bytes)


def estimate_weight_bytes(config: ModelConfig, layout: ParallelConfig, dtype: str) -> int:
    """Bytes of a model's weights on each rank of its largest stage.

    Raises:
        LayoutError: the layout does not divide the model; the hint says which sizes do.
    """
    totals = []
    for stage in range(layout.pp):
        stages = build_stages(config, meta_groups(layout, stage), dtype=getattr(torch, dtype))
        parameters = [p for decoder in stages for p in decoder.parameters()]
        totals.append(sum(p.numel() * p.element_size() for p in parameters))
    return max(totals)


def estimate_fake_quant_bytes(
    config: ModelConfig, layout: ParallelConfig, dtype: str, modules: Iterable[str]
) -> int:
    """Bytes of the parameters that hold weights of `modules`, which QAT copies on a rank."""
    named, totals = list(modules), [0]
    for stage in range(layout.pp):
        total = 0
        for decoder in build_stages(
            config, meta_groups(layout, stage), dtype=getattr(torch, dtype)
        ):
            canonical = set(
                canonical_side(config, {str(n) for n in decoder.stage.layers}).canonical
            )
            if decoder.stage.head:
                canonical |= set(canonical_side(config, {""}).canonical)
            views = WeightViews(decoder, [m for m in named if f"{m}.weight" in canonical])
            for name in views.parameters(views.parts):
                p = decoder.get_parameter(name)
                total += p.numel() * p.element_size()
        totals.append(total)
    return max(totals)


def meta_groups(layout: ParallelConfig, stage: int) -> ProcessGroups:
    """The groups of the first rank of a stage, without processes and on the meta device."""

    def group(size: int, rank: int = 0) -> Group:
        return Group(ranks=tuple(range(size)), rank=rank)

    groups = ProcessGroups.alone("meta")
    return replace(
        groups,
        parallel=layout,
        tp=group(layout.tp),
        cp=group(layout.cp),
        pp=group(layout.pp, stage),
        dp=group(layout.dp),
        ep=group(layout.ep),
        etp=group(layout.etp),
        expert_dp=group(layout.expert_dp),
        replicas=group(layout.dp * layout.cp),
        ends=group(min(2, layout.pp)),
    )


def _measure_stages(
    stages: list[Decoder], settings: TrainConfig, layout: ParallelConfig, dtype: torch.dtype
) -> RankMemory:
    parameters = [p for stage in stages for p in stage.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    moments = {"adam": 2, "sgd": 1, "muon": 1}[settings.optimizer.optimizer]
    each = moments * (2 if settings.optimizer.exp_avg_dtype == "bf16" else 4)
    if dtype != torch.float32 and not settings.sharding.is_fully_sharded:
        each += 2 if settings.optimizer.store_param_remainders else 4
    is_sharded = settings.sharding.sharding_strategy != "no_shard"
    optimizer = sum(
        p.numel() * each / (_num_shards(p, settings, layout) if is_sharded else 1) for p in trained
    )
    weight_bytes = sum(
        p.numel() * (1 if marked_block(p) is not None and p.requires_grad else p.element_size())
        for p in parameters
    )
    narrow = settings.optimizer.grad_reduce_in_bf16
    gradient_bytes = sum(p.numel() * (p.element_size() if narrow else 4) for p in trained)
    if settings.sharding.is_fully_sharded:
        weight_bytes, gradient_bytes = _measure_shards(stages, settings, layout)
    return RankMemory(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=round(optimizer),
        adapter_bytes=sum(
            p.numel() * p.element_size()
            for stage in stages
            for n, p in stage.named_parameters()
            if ".adapter." in n
        ),
    )


def _num_shards(p: nn.Parameter, settings: TrainConfig, layout: ParallelConfig) -> int:
    """Ranks that optimizer state of a parameter is sharded over."""
    is_dense = getattr(p, "allreduce", True)
    replicas = layout.dp * layout.cp if is_dense else layout.expert_dp
    return max(1, replicas // settings.sharding.num_distributed_optimizer_instances)


def _measure_shards(
    stages: list[Decoder], settings: TrainConfig, layout: ParallelConfig
) -> tuple[int, int]:
    """Bytes of weights and gradients that are sharded by FSDP2: fp32 shards of what is trained, and
    what is gathered in the model's dtype: all of it, or with ZeRO-3 what is outside of layers, and
    the two largest layers, of which one is gathered while the other is used. Gradients are whole
    in the layer of the backward pass.
    """
    weights = gradients = 0.0
    gathered, layers = 0, []
    for stage in stages:
        units: dict[nn.Module, int] = {}
        owner = {p: m for m in stage.modules() if is_layer(m) for p in m.parameters()}
        for p in stage.parameters():
            share = p.numel() / _num_shards(p, settings, layout)
            weights += share * (4 if p.requires_grad else p.element_size())
            gradients += share * 4 * p.requires_grad
            unit = owner.get(p, stage)
            units[unit] = units.get(unit, 0) + p.numel() * p.element_size()
        gathered += units.pop(stage, 0)
        layers += list(units.values())
    largest = sorted(layers)[-2:]
    gathered += sum(
        largest if settings.sharding.sharding_strategy == "optim_grads_params" else layers
    )
    return round(weights) + gathered, round(gradients) + (largest[-1] if largest else 0)
