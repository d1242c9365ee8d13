"""An optimizer's state as a state dict of PyTorch has it: by the names of any model.

Moments and master weights are tensors under the names of a model (`TensorFinder`). Steps and param
groups are not: state dicts of PyTorch have them per parameter, Megatron per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megtool.access.live_objects import live_value
from megtool.access.tensor_finder import TensorFinder, TensorMatch
from megtool.convert.dialects import is_optimizer_state
from megtool.convert.megatron.names import split_optimizer
from megtool.megatron_state.param_groups import read_groups
from megtool.run_state.common_state import read_iteration
from megtool.run_state.state_dict_groups import (
    STEP,
    StateDictGroup,
    read_state_dict_groups,
    read_steps,
)
from megtool.source.checkpoint import CheckpointSource

ABSENT = object()
"""What a setting is that the checkpoint does not have, or not for all of some parameters."""

_OWN = frozenset(
    ("params", "foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")
)
"""Settings of how a program computes, which another program's groups say nothing about."""


class SavedOptimizer:
    """The optimizer's part of a checkpoint; `source` was opened with it."""

    def __init__(
        self, source: CheckpointSource, naming: str | None = None, *, threads: int | None = None
    ) -> None:
        self._source = source
        self._finder = TensorFinder(source, naming, threads=threads)

    @cached_property
    def exists(self) -> bool:
        """Whether there is any."""
        return any(is_optimizer_state(t.name) for t in self._source.catalogue.tensors)

    def find(self, state: str, name: str, prefix: str = "") -> TensorMatch | None:
        """The state of the weight that a model calls `name`."""
        match = self._finder.find(name, state)
        if match is None and prefix:
            match = self._finder.find(name, state, prefix)
        return match

    def _moment(self, name: str, prefix: str) -> TensorMatch | None:
        """The first moment of a weight, which Adam and SGD have."""
        states = (self.find(state, name, prefix) for state in ("exp_avg", "momentum_buffer"))
        return next((match for match in states if match is not None), None)

    def step(self, name: str, prefix: str = "") -> float | None:
        """How many steps a parameter was trained; None if the checkpoint does not say.

        That is its own step, the one of its group, or the iteration of the run.
        """
        stored = self._stored_names(name, prefix)
        if not stored:
            return None
        if (step := self._steps.get(stored[0])) is not None:
            return step
        value = self.setting([name], STEP, prefix)
        if value is ABSENT:
            value = read_iteration(self._source.catalogue) or None
        return float(value) if isinstance(value, int | float) else None

    def setting(self, names: Sequence[str], key: str, prefix: str = "") -> Any:
        """A setting of the group of some parameters (`lr`); ABSENT if theirs are not the same."""
        value: Any = ABSENT
        for name in names:
            for group in self._groups_of(name, prefix):
                is_own = key in _OWN and group.params is None
                each = ABSENT if is_own else _live(group.settings.get(key, ABSENT))
                if each is ABSENT or (value is not ABSENT and each != value):
                    return ABSENT
                value = each
        return value

    def _groups_of(self, name: str, prefix: str) -> list[StateDictGroup]:
        """The groups that a parameter may be in: its own, or those of its kind."""
        stored = {name, *self._stored_names(name, prefix)}
        named = [g for g in self._groups if g.params and not stored.isdisjoint(g.params)]
        if named:
            return named[:1]
        groups = [g for g in self._groups if g.params is None]
        match = self._moment(name, prefix)
        if match is None or len(groups) < 2:
            return groups
        is_vector = len(match.tensor.shape) < 2 or name.endswith(".bias")
        alike = [g for g in groups if _is_undecayed(g.settings) == is_vector]
        return alike or groups

    def _stored_names(self, name: str, prefix: str) -> list[str]:
        """What the parameters are called in the checkpoint of which `name` has elements."""
        match = self._moment(name, prefix)
        if match is None:
            return []
        named, tensor = match.naming.named, match.tensor.key
        if named.naming not in self._parts:
            parts: dict[str, list[str]] = {}
            for canonical, p in named.target.placements.items():
                stored = split_optimizer(named.source.placements[canonical].stored)[2]
                parts.setdefault(p.stored, []).append(stored)
            self._parts[named.naming] = parts
        return self._parts[named.naming].get(tensor, [])

    @cached_property
    def _parts(self) -> dict[str, dict[str, list[str]]]:
        """The names of parameters in the checkpoint, by naming and tensor."""
        return {}

    @cached_property
    def _steps(self) -> Mapping[str, float]:
        """Steps by the stored names of parameters, in state dicts that have them so."""
        return read_steps(self._source.catalogue)

    @cached_property
    def _groups(self) -> list[StateDictGroup]:
        """Param groups; those of Megatron have no names of parameters."""
        groups = read_state_dict_groups(self._source.catalogue)
        if groups:
            return groups
        chain = read_groups(self._source.catalogue)
        return [
            StateDictGroup(params=None, settings={str(k): v for k, v in g.items()})
            for state in (chain.chain if chain else ())
            for g in _group_list(state.get("optimizer"))
        ]


def _live(tree: Any) -> Any:
    """A setting's value; ABSENT if it is none that a program could have."""
    left_out: list[str] = []
    value = ABSENT if tree is ABSENT else live_value(tree, "", left_out)
    if left_out or isinstance(value, dict):
        return ABSENT
    return tuple(value) if isinstance(value, list) else value


def _group_list(optimizer: Any) -> list[dict[Any, Any]]:
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    return [g for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []


def _is_undecayed(settings: Mapping[str, Any]) -> bool:
    """Whether a group is of the parameters without weight decay: of norms and biases."""
    return bool(settings.get("wd_mult", settings.get("weight_decay")) == 0)
