"""Template: all of a saved iteration but its values: names, cuts, args, objects and small files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megtool.config import ModelConfig, ParallelConfig
from megtool.convert.rank_parameters import Parameter
from megtool.dtypes import DType
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlot:
    """A parameter's place in the optimizer's buckets.

    `tensors` is, for every state as it is stored, the number of the flat tensor in which the
    parameter's elements start at `start`; `rank` is the first of the ranks that share it out.
    """

    parameter: Parameter
    tensors: Mapping[str, int]
    start: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Optimizer state as `dp_reshardable` stores it: flat tensors, and who lies where in them.

    `objects` say how large the buckets are. `prefixes` are those of the objects that hold the small
    state of every data-parallel group, each with its number in the chain of optimizers.
    """

    tensors: tuple[GlobalTensor, ...]
    slots: tuple[BucketSlot, ...]
    objects: Mapping[str, Any]
    prefixes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTemplate:
    """What `megtool reshard` would write of a model's weights at a layout, without their values.

    `tensors` are the weights as they are stored, under Megatron's names. `objects` (bytes of ready
    items) and `small` files go beside them as they are; `common` is Megatron's common state, of
    which a save replaces what has changed since. `flat` lays out `dp_reshardable` buckets for
    states, as they are spelled, of given types. `megtool.train.checkpointing.megatron_template.template_of` makes one.
    """

    config: ModelConfig
    parallel: ParallelConfig
    tensors: tuple[GlobalTensor, ...]
    common: Mapping[str, Any]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)
    plan_buckets: Callable[[Mapping[str, DType]], BucketLayout] | None = None
