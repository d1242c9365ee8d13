"""A saved iteration without its values: names, shards, args, objects and small files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megtool.convert.megatron.rank_parameters import Parameter
from megtool.dtypes import DType
from megtool.options.layout import ParallelConfig
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlot:
    """A parameter's position in the optimizer's buckets.

    `tensors` has for every stored state the number of the flat tensor in which the parameter's
    elements start at `start`. `rank` is the first of the ranks that it is sharded over.
    """

    parameter: Parameter
    tensors: Mapping[str, int]
    start: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Optimizer state as `dp_reshardable` stores it: flat tensors, and parameters' positions there.

    `objects` describe the sizes of the buckets. `prefixes` are those of the objects with the small
    state of every data-parallel group, each with its number in the chain of optimizers.
    """

    tensors: tuple[GlobalTensor, ...]
    slots: tuple[BucketSlot, ...]
    objects: Mapping[str, Any]
    prefixes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTemplate:
    """What `megtool reshard` would write of a model's weights at a layout, without their values.

    `tensors` are the stored weights, under Megatron's names. `objects` (bytes of ready items) and
    `small` files are written unchanged; `common` is Megatron's common state, which a save updates.
    `carried` are values of stored weights that no module of this rank has: the parts of a model
    other than its text, which a run does not change. `whole` are further small tensors, which rank
    0 carries and writes. `rotation` is the record of what the weights are multiplied by.
    `plan_buckets` plans `dp_reshardable` buckets for stored states of given dtypes. See
    `megtool.train.checkpointing.megatron_template.make_save_template`.
    """

    config: ModelConfig
    parallel: ParallelConfig
    tensors: tuple[GlobalTensor, ...]
    common: Mapping[str, Any]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    whole: tuple[GlobalTensor, ...] = ()
    rotation: Mapping[str, Any] | None = None
    plan_buckets: Callable[[Mapping[str, DType]], BucketLayout] | None = None
