"""The optimizer's param groups, step and loss scale, which each format stores differently.

Megatron stores them in the common state (`fully_reshardable`, and optimizers that are not
distributed), in one object per data-parallel group (`dp_reshardable`), or in every rank's
`model_optim_rng.pt` (legacy). Expert parameters spread over ranks have an optimizer of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megtool.megatron_state.saved_objects import read_object
from megtool.pickles.reader import find_references
from megtool.tensors.catalogue import Catalogue

FULLY_RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
SHARDING_TYPE = "param_state_sharding_type"
OPTIMIZER_OBJECT = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)/shard_0_1"
)
_SMALL = ("optimizer", "grad_scaler")
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
}

OptimizerState = dict[str, Any]
"""State of one optimizer of a chain without its tensors: `optimizer`, perhaps `grad_scaler`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroups:
    """The small state of every optimizer of a chain, the dense one first."""

    chain: tuple[OptimizerState, ...]

    def for_chain(self, length: int) -> list[OptimizerState]:
        """The state for a chain of another length.

        Two become one by dropping the experts' state, which has the same settings. One becomes two
        by marking a copy of its groups as expert-parallel.
        """
        if length <= len(self.chain):
            return [dict(c) for c in self.chain[:length]]
        last = self.chain[-1]
        experts = {**last, "optimizer": _expert_groups(last.get("optimizer"))}
        return [dict(c) for c in self.chain] + [experts] * (length - len(self.chain))


def read_groups(catalogue: Catalogue) -> OptimizerGroups | None:
    """Read the optimizer's small state from its objects or the common state; None if absent."""
    chain = _from_objects(catalogue) or _from_common(catalogue)
    return OptimizerGroups(chain=tuple(_normalize(c) for c in chain)) if chain else None


def is_group_object(name: str) -> bool:
    """Whether the object is part of the optimizer's small state, or sizes given by the layout."""
    match = OPTIMIZER_OBJECT.fullmatch(name)
    return match is not None and match[3] != "param_state"


def scalar_value(value: Any) -> float | None:
    """A number, or the first element of an inert tensor; None for anything else."""
    if isinstance(value, int | float):
        return float(value)
    for reference in find_references(value):
        kind = _STORAGES.get(getattr(reference.id[1], "qualname", ""))
        if kind is not None and reference.data:
            return float(np.frombuffer(reference.data, kind)[0])
    return None


def build_common_optimizer(chain: Sequence[OptimizerState], kind: str | None) -> Any:
    """The value of `optimizer` in Megatron's common state.

    `kind` is the optimizer's sharding type; with `dp_reshardable` the value holds only that.
    """
    parts: list[dict[str, Any]] = []
    for state in chain:
        part = {} if kind == DP_RESHARDABLE else {k: state[k] for k in state if k != SHARDING_TYPE}
        parts.append(part if kind is None else {**part, SHARDING_TYPE: kind})
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


def optimizer_args(kind: str) -> dict[str, Any]:
    """Megatron's args that describe how the state of a distributed optimizer was saved."""
    return {
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": kind == FULLY_RESHARDABLE,
    }


def build_content_metadata(old: Any, kind: str) -> dict[str, Any]:
    """The common state's `content_metadata`, as core 0.14 and later write it, for state of `kind`.

    `old` is the value in the source.
    """
    return {
        "singleton_local_shards": False,
        **(old if isinstance(old, dict) else {}),
        "distrib_optim_sharding_type": kind,
        "chained_optim_avoid_prefix": True,
    }


def _from_objects(catalogue: Catalogue) -> list[OptimizerState]:
    """One object per data-parallel group; all of a chain are equal, so the first is used."""
    names_by_optimizer: dict[int, dict[str, str]] = {}
    for name in catalogue.objects:
        match = OPTIMIZER_OBJECT.fullmatch(name)
        if match and match[3] in _SMALL:
            names_by_optimizer.setdefault(int(match[1] or 0), {}).setdefault(match[3], name)
    return [
        {key: read_object(catalogue, catalogue.objects[name]) for key, name in names.items()}
        for _, names in sorted(names_by_optimizer.items())
    ]


def _from_common(catalogue: Catalogue) -> list[OptimizerState]:
    common = catalogue.metadata.get("common")
    optimizers = common.get("optimizer") if isinstance(common, dict) else None
    if isinstance(optimizers, dict) and optimizers and all(isinstance(k, int) for k in optimizers):
        optimizers = [optimizers[k] for k in sorted(optimizers)]
    parts = optimizers if isinstance(optimizers, list) else [optimizers]
    out = []
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("optimizer"), dict):
            out.append({k: v for k, v in part.items() if k in _SMALL})
    return out


def _normalize(inner: OptimizerState) -> OptimizerState:
    """The small state with its step in the param groups, and without parameter numbers.

    An optimizer that is not distributed stores the step as a tensor, per parameter or once.
    """
    optimizer = inner["optimizer"]
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list):
        return inner
    step = _find_step(optimizer.get("state"))
    normalized = []
    for group in groups:
        fields = (
            {k: v for k, v in group.items() if k != "params"} if isinstance(group, dict) else {}
        )
        if step is not None:
            fields.setdefault("step", step)
        normalized.append(fields)
    others = {k: v for k, v in optimizer.items() if k != "state"}
    return {**inner, "optimizer": {**others, "param_groups": normalized}}


def _find_step(state: Any) -> float | None:
    """The step among an optimizer's per-parameter state, as a number."""
    if not isinstance(state, dict):
        return None
    first = next((v for v in state.values() if isinstance(v, dict)), {})
    return scalar_value(state.get("common_step", first.get("step")))


def _expert_groups(inner: Any) -> Any:
    """Param groups of the experts' optimizer, derived from the dense one's."""
    if not isinstance(inner, Mapping):
        return inner
    groups = inner.get("param_groups")
    if not isinstance(groups, list):
        return inner
    marked = [{**g, "is_expert_parallel": True} if isinstance(g, dict) else g for g in groups]
    decayed = [g for g in marked if not isinstance(g, dict) or g.get("wd_mult") != 0.0]
    return {**inner, "param_groups": decayed or marked}
