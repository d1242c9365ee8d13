"""Muon's update of matrices, which are assembled from segments and tp ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Segment
from megtool.optim.update_rules import Muon
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import Group, ProcessGroups


def orthogonalize_matrices(
    update: Muon,
    facts: Sequence[ParamInfo],
    segments: Sequence[Segment],
    groups: ProcessGroups,
    *,
    lr: float,
) -> None:
    """Do the Newton-Schulz step of every matrix of a group, after `Muon.apply`.

    `facts` are the infos of the group's matrices, in the same order on all replicas. Stacked
    experts are a matrix each, and fused queries, keys and values are three (`row_parts`).
    `segments` have the momentum in `grad`. A matrix that is sharded over replicas or tp ranks is
    assembled in bf16, the dtype it is used in, by a sum; each rank with a part computes the whole
    matrix and takes its part. Results depend on the layout only through the order of sums.
    """
    for f in facts:
        local_spans = [(s, span) for s in segments for span in s.spans if span.param_info is f]
        shape = f.parameter.shape
        local = torch.zeros(f.parameter.numel(), dtype=torch.bfloat16, device=f.parameter.device)
        for s, span in local_spans:
            if s.grad is not None:
                local[span.start : span.stop].copy_(s.grad[span.offset : span.end])
        if not any(s.replicated for s, _ in local_spans):
            local = all_sum(local, groups.expert_dp if f.is_expert else groups.replicas)
        if not local_spans:
            continue
        tp = groups.etp if f.is_expert else groups.tp
        if f.is_tp_duplicate or tp.size == 1:
            direction, factor = _muon_direction(update, local.view(shape), f.row_parts)
        else:
            dim = int(f.parameter.partition_dim)  # type: ignore[attr-defined]
            full_direction, factor = _muon_direction(
                update, _gather(local.view(shape), tp, dim), f.row_parts
            )
            direction = full_direction.chunk(tp.size, dim)[tp.rank]
        flat = direction.float().flatten()
        for s, span in local_spans:
            main = s.read_main(span.offset, span.end)
            main.add_(flat[span.start : span.stop].to(main.device), alpha=-lr * factor)
            if s.main is None:
                s.write_main(span.offset, span.end, main)


def _muon_direction(update: Muon, weight: Tensor, row_parts: Sequence[int]) -> tuple[Tensor, float]:
    """The update direction of a matrix, a stack of them, or several fused ones; and a joint factor.

    Fused parts are in groups of `row_parts` rows of each: `[g1 of q, g1 of k, g1 of v, g2 of q,
    ...]`.
    """
    if weight.dim() == 3:
        turned = [update.direction(matrix) for matrix in weight]
        return torch.stack([direction for direction, _ in turned]), turned[0][1]
    if not row_parts:
        return update.direction(weight)
    width = weight.shape[1]
    out = []
    for part in weight.view(-1, sum(row_parts), width).split_with_sizes(list(row_parts), 1):
        direction, factor = update.direction(part.reshape(-1, width))
        out.append(direction.float().mul_(factor).view(part.shape))
    return torch.cat(out, 1).view(weight.shape), 1.0


def _gather(part: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts along a dim, by a sum of each rank's part padded with zeros."""
    shape = list(part.shape)
    shape[dim] *= group.size
    gathered = part.new_zeros(shape)
    gathered.chunk(group.size, dim)[group.rank].copy_(part)
    return all_sum(gathered, group)
