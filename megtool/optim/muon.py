"""Matrices for Muon: put together from segments and tp ranks, made orthogonal, and given back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megtool.optim.groups import Facts
from megtool.optim.state import Segment
from megtool.optim.updates import Muon
from megtool.parallel.collectives import all_sum
from megtool.parallel.groups import Group, Groups


def turn_matrices(
    update: Muon, facts: Sequence[Facts], segments: Sequence[Segment], groups: Groups, *, lr: float
) -> None:
    """Take the Newton-Schulz step of every matrix of a group, after `Muon.apply`.

    `facts` are of the group's matrices, in the same order on all replicas; `segments` hold the
    momentum in `grad`. A matrix that is cut over replicas or tp ranks is put together in bf16, as
    it is then used, by a sum over them; each rank that holds a part does the whole matrix' steps,
    and takes its part. So results do not depend on the layout but for the order of sums.
    """
    for f in facts:
        held = [(s, span) for s in segments for span in s.spans if span.facts is f]
        shape = f.parameter.shape
        local = torch.zeros(f.parameter.numel(), dtype=torch.bfloat16, device=f.parameter.device)
        for s, span in held:
            if s.grad is not None:
                local[span.start : span.stop].copy_(s.grad[span.at : span.end])
        if not any(s.replicated for s, _ in held):
            local = all_sum(local, groups.expert_dp if f.is_expert else groups.replicas)
        if not held:
            continue
        tp = groups.etp if f.is_expert else groups.tp
        if f.is_tp_duplicate or tp.size == 1:
            direction, factor = update.direction(local.view(shape))
        else:
            dim = int(f.parameter.partition_dim)  # type: ignore[attr-defined]
            whole, factor = update.direction(_gather(local.view(shape), tp, dim))
            direction = whole.chunk(tp.size, dim)[tp.rank]
        flat = direction.float().flatten()
        for s, span in held:
            main = s.read_main(span.at, span.end)
            main.add_(flat[span.start : span.stop].to(main.device), alpha=-lr * factor)
            if s.main is None:
                s.write_main(span.at, span.end, main)


def _gather(part: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts along a dim, by a sum of what each has, with zeros elsewhere."""
    shape = list(part.shape)
    shape[dim] *= group.size
    whole = part.new_zeros(shape)
    whole.chunk(group.size, dim)[group.rank].copy_(part)
    return all_sum(whole, group)
