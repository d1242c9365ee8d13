"""Attributes of parameters: how each is sharded, and how its gradient is reduced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import SHARING_STAGES, Group, ProcessGroups


def mark(
    parameter: nn.Parameter,
    *,
    split_dim: int | None = None,
    partial: bool = False,
    expert: bool = False,
    tied: bool = False,
    copy: bool = False,
    over: str = "ends",
    embedding: bool = False,
) -> nn.Parameter:
    """Set on a parameter, in Megatron's terms, how its gradient is reduced. Returns it.

    `split_dim`: each tp rank holds another part, cut along this dim (`tensor_model_parallel`,
    `partition_dim`); without it all hold the same, and norms of gradients count it on one tp rank
    alone. `partial`: all hold the same, and each computes a part of the gradient, from its own
    tokens (sequence parallelism) or heads (norms of queries and keys); `finish_gradients` adds
    them up (`sequence_parallel`). `expert`: replicas are those of `expert_dp` (`allreduce` is
    False). `tied`: the first and the last stage both hold it and use it, so gradients are added up
    over both (`shared_embedding`); `copy`: it is the last stage's (`shared`), norms skip it. Other
    stages hold it in a model with an encoder: `over` is their group (`stages_summed`). `embedding`:
    rows are looked up (`is_embedding_parameter`), whether or not it is the output layer, too.
    """
    facts = {
        "tensor_model_parallel": split_dim is not None,
        "partition_dim": -1 if split_dim is None else split_dim,
        "sequence_parallel": partial,
        "allreduce": not expert,
        "shared_embedding": tied,
        "shared": copy,
        "stages_summed": over if tied else "",
        "is_embedding_parameter": embedding,
    }
    for name, value in facts.items():
        setattr(parameter, name, value)
    return parameter


def mark_parts(parameter: nn.Parameter, rows: tuple[int, ...]) -> nn.Parameter:
    """Write on a matrix that it is several in one: groups of so many rows of each. Returns it.

    Of queries, keys and values in one, a group is a query group. Optimizers that update whole
    matrices take them apart (`row_parts`).
    """
    parameter.row_parts = rows  # type: ignore[attr-defined]
    return parameter


def is_marked(parameter: nn.Parameter, fact: str) -> bool:
    """One of the attributes that `mark` writes; False on a parameter without marks."""
    return bool(getattr(parameter, fact, fact == "allreduce"))


def finish_gradients(module: nn.Module, groups: ProcessGroups) -> None:
    """Reduce the gradients of one replica, in place, after its last backward pass.

    Adds up over tp what `mark(partial=True)` names, and over the stages that hold the same what
    each does (`mark(tied=True)`). One collective for each dtype.
    Replicas are another matter: `sum_over_replicas`. Every rank of the groups has to call this.
    """
    partial = [p for p in module.parameters() if is_marked(p, "sequence_parallel")]
    _sum(partial, groups.tp)
    for over in SHARING_STAGES:
        shared = [p for p in module.parameters() if getattr(p, "stages_summed", "") == over]
        _sum(shared, getattr(groups, over))


def sum_over_replicas(module: nn.Module, groups: ProcessGroups) -> None:
    """Add up gradients over data-parallel replicas, in place: dense ones and experts each over
    their own. Nothing is divided: a loss that is a sum over tokens stays one."""
    named = list(module.parameters())
    _sum([p for p in named if is_marked(p, "allreduce")], groups.replicas)
    _sum([p for p in named if not is_marked(p, "allreduce")], groups.expert_dp)


def _sum(parameters: list[nn.Parameter], group: Group) -> None:
    if group.handle is None:
        return
    for gradients in _by_dtype(parameters):
        flat = all_sum(torch.cat([g.flatten() for g in gradients]), group)
        offset = 0
        for g in gradients:
            g.copy_(flat[offset : offset + g.numel()].view_as(g))
            offset += g.numel()


def _by_dtype(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Gradients in lists of one dtype, the same on every rank; unused parameters have zero
    gradients.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        kinds.setdefault(p.grad.dtype, []).append(p.grad)
    yield from (kinds[kind] for kind in sorted(kinds, key=str))
