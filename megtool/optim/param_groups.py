"""Parameter groups, and how each parameter is distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from megtool.errors import MappingError, UsageError
from megtool.optim.config import GroupRule, OptimizerConfig
from megtool.parallel.process_groups import ALONE, Group

_Kind = Literal["adam", "sgd", "muon"]

# Muon is for the matrices between the embedding and the output.
_NOT_HIDDEN = ("*embedding*", "*output_layer*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamInfo:
    """A trained parameter, and how its gradient is reduced.

    `is_expert`: its replicas are those of `expert_dp`. `is_tp_duplicate`: every tp rank has the
    same, so norms count it on one. `is_partial`: each tp rank has a part of its gradient.
    `is_tied`: other stages have it as well, each with a part of its gradient, and `stages_summed`
    is their group; `is_shared_copy`: it is a copy, which norms skip. `row_parts`: the matrix is
    several fused ones, in groups of so many rows of each.
    """

    name: str
    parameter: nn.Parameter
    is_expert: bool = False
    is_tp_duplicate: bool = False
    is_shared_copy: bool = False
    is_tied: bool = False
    stages_summed: str = ""
    is_partial: bool = False
    row_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters with the same settings; `names` are those of this rank, possibly none."""

    lr_mult: float = 1.0
    wd_mult: float = 1.0
    is_expert: bool = False
    update: _Kind = "adam"
    names: tuple[str, ...] = ()


# What distinguishes groups, in the order they are sorted by.
_Key = tuple[bool, float, float, _Kind]


def collect_param_infos(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[ParamInfo]:
    """The infos of the parameters that are trained (`requires_grad`), from their attributes.

    A parameter without attributes is the same on every tp rank.

    Raises:
        MappingError: a name or a parameter is given twice.
    """
    out: list[ParamInfo] = []
    names: set[str] = set()
    name_of_param: dict[int, str] = {}
    for name, p in named_parameters:
        if name in names or id(p) in name_of_param:
            raise MappingError(
                f"parameter {name!r} is given twice to the optimizer"
                + (f", as {name_of_param[id(p)]!r} too" if id(p) in name_of_param else ""),
                tensor=name,
                hint="use one name for each parameter, with the stage in it if there are several",
            )
        names.add(name)
        name_of_param[id(p)] = name
        if not p.requires_grad:
            continue
        out.append(
            ParamInfo(
                name=name,
                parameter=p,
                is_expert=not getattr(p, "allreduce", True),
                is_tp_duplicate=not getattr(p, "tensor_model_parallel", False),
                is_shared_copy=bool(getattr(p, "shared", False)),
                is_tied=bool(getattr(p, "shared_embedding", False)),
                stages_summed=getattr(p, "stages_summed", ""),
                is_partial=bool(getattr(p, "sequence_parallel", False)),
                row_parts=tuple(getattr(p, "row_parts", ())),
            )
        )
    return out


def group_parameters(
    facts: Sequence[ParamInfo],
    settings: OptimizerConfig,
    world: Group = ALONE,
) -> list[ParamGroup]:
    """Parameter groups in Megatron's order: dense before experts, those without overrides first.

    Every rank of `world` gets the same groups in the same order, as checkpoints need, so some may
    be empty. Biases and 1-D parameters have no weight decay. Every rank has to call this.

    Raises:
        UsageError: a rule matches no parameter of any rank.
    """
    local_names: dict[_Key, list[str]] = {}
    used: set[int] = set()
    for f in facts:
        rule_index = next(
            (i for i, r in enumerate(settings.rules) if fnmatchcase(f.name, r.glob)), None
        )
        if rule_index is not None:
            used.add(rule_index)
        rule = GroupRule("*") if rule_index is None else settings.rules[rule_index]
        local_names.setdefault(_key(f, rule, settings), []).append(f.name)
    all_ranks: list[Any] = [(list(local_names), used)]
    if world.handle is not None:
        all_ranks = [None] * world.size
        dist.all_gather_object(all_ranks, (list(local_names), used), group=world.handle)
    matched = {i for _, used_rules in all_ranks for i in used_rules}
    idle = [rule.glob for i, rule in enumerate(settings.rules) if i not in matched]
    if idle:
        raise UsageError(
            f"the rule for {idle[0]!r} matches no parameter",
            hint="names are Megatron's, such as decoder.layers.0.mlp.linear_fc1.weight; an earlier "
            "rule may match the same parameters",
        )
    keys = {key for keys, _ in all_ranks for key in keys}
    return [
        ParamGroup(
            is_expert=key[0],
            wd_mult=key[1],
            lr_mult=key[2],
            update=key[3],
            names=tuple(local_names.get(key, ())),
        )
        for key in sorted(keys, key=_order)
    ]


def _key(facts: ParamInfo, rule: GroupRule, settings: OptimizerConfig) -> _Key:
    shape = facts.parameter.shape
    plain = 0.0 if len(shape) == 1 or facts.name.endswith("bias") else 1.0
    decay = plain if rule.wd_mult is None else rule.wd_mult
    update = settings.optimizer
    if update == "muon":
        # Stacked experts have a matrix each; their stacked biases are not matrices.
        is_matrix = len(shape) == 2 or (len(shape) == 3 and facts.is_expert)
        is_matrix = is_matrix and not facts.name.endswith("bias")
        if not is_matrix or any(fnmatchcase(facts.name, glob) for glob in _NOT_HIDDEN):
            update = "adam"
    return facts.is_expert, decay, rule.lr_mult, update


def _order(key: _Key) -> tuple[Any, ...]:
    """Sort dense groups first, and groups without overrides before others."""
    is_expert, decay, mult, update = key
    return is_expert, (decay, mult) != (1.0, 1.0), mult, decay, update
