"""Tensors under their own names: what a checkpoint of an unknown model is read and written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megtool.config import ModelConfig, ParallelConfig
from megtool.convert import megatron
from megtool.convert.sharding import shard
from megtool.convert.sides import Padding, Side, TargetSide
from megtool.dtypes import DType
from megtool.tensors.relation import Placement
from megtool.tensors.sharded import GlobalTensor


def as_they_are(tensors: Sequence[GlobalTensor], config: ModelConfig | None) -> Side:
    """Every stored tensor is its own canonical one, less the padding of a known vocabulary."""
    placements: dict[str, Placement] = {}
    canonical: dict[str, GlobalTensor] = {}
    padding: dict[str, int] = {}
    for t in tensors:
        shape = t.shape
        if config is not None and shape and megatron.is_vocabulary(t.name):
            rows = min(shape[0], config.vocab_size)
            if rows < shape[0]:
                padding[t.name] = shape[0] - rows
            shape = (rows, *shape[1:])
        placements[t.name] = Placement.identity(t.name, shape)
        canonical[t.name] = GlobalTensor(name=t.name, shape=shape, dtype=t.dtype)
    return Side(
        dialect="identity",
        tensors=tuple(tensors),
        placements=placements,
        canonical=canonical,
        padding=padding,
        config=config,
    )


_OPTIMIZERS = frozenset({"optim", "optims", "optimizer", "optimizers", "optimizer_state"})
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step"})


def is_optimizer_state(name: str) -> bool:
    """The stored name says optimizer state: Megatron's spelling, or a part of its path."""
    parts = name.split(".")
    return (
        megatron.split_state(name)[0] != ""
        or parts[-1] in _STATES
        or not _OPTIMIZERS.isdisjoint(parts)
    )


def under_same_names(
    source: Side,
    config: ModelConfig | None,
    dtype: DType | None,
    parallel: ParallelConfig | None,
    divisible_by: int,
) -> TargetSide:
    """The source's own names, with the vocabulary padded for another layout.

    With a configuration the padding is Megatron's for the new TP; without one the stored rows
    count as real, and rows are added only if TP does not divide them.
    """
    tensors: list[GlobalTensor] = []
    fills: list[Padding] = []
    pad_to = megatron.padded_multiple(parallel.tp if parallel else 1, divisible_by)
    cut = parallel is not None and megatron.is_megatron(source.canonical)
    for name, t in source.canonical.items():
        shape = t.shape
        if parallel is not None and cut and shape and megatron.is_vocabulary(name):
            rows = shape[0]
            if config is not None or rows % parallel.tp:
                rows = -(-rows // pad_to) * pad_to
            shape = (rows, *shape[1:])
        if shape != t.shape:
            whole = Placement.identity(f"padding of {name}", shape, stored=name)
            rest = (shape[0] - t.shape[0], *shape[1:])
            base = (t.shape[0], *(0 for _ in shape[1:]))
            fills.append(Padding(placement=replace(whole, shape=rest, base=base)))
        is_weight = not is_optimizer_state(name) and not name.endswith(".router.expert_bias")
        kind = dtype if dtype is not None and t.dtype.is_float and is_weight else t.dtype
        tensors.append(GlobalTensor(name=name, shape=shape, dtype=kind))
    shards = shard(tensors, parallel, config=config) if parallel is not None else None
    return TargetSide(
        tensors=tensors,
        placements={n: replace(p, stored=n) for n, p in source.placements.items()},
        shards=shards,
        fills=fills,
        dropped=[],
    )
