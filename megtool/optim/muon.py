"""Muon: orthogonalized momentum of matrices, which are assembled from segments and tp ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Segment
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import Group, ProcessGroups


class Muon:
    """Momentum that Newton-Schulz steps make orthogonal, for whole matrices.

    As `torch.optim.Muon` with Nesterov momentum and `match_rms_adamw`: updates have the size of
    Adam's, so that both use the same learning rate. Its `apply` is the elementwise part (momentum);
    `orthogonalize_matrices` gathers the matrices and does the other steps.
    Source: K. Jordan et al., "Muon", 2024; Liu et al., arXiv 2502.16982.
    """

    states: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, *, momentum: float, steps: int = 5) -> None:
        self.momentum = momentum
        self.steps = steps

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its entries in a checkpoint's parameter groups."""
        return {"momentum": self.momentum, "nesterov": True, "ns_steps": self.steps}

    def apply(
        self,
        mains: list[Tensor],
        grads: list[Tensor],
        states: dict[str, list[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Turn gradients into the momentum to make orthogonal, and decay the parameters."""
        for main, grad, momentum in zip(mains, grads, states["momentum_buffer"], strict=True):
            momentum.lerp_(grad, 1 - self.momentum)
            grad.lerp_(momentum, self.momentum)
            main.mul_(1 - lr * weight_decay)

    def direction(self, matrix: Tensor) -> tuple[Tensor, float]:
        """The update direction (bf16) of a 2-D tensor, and the factor of its size."""
        factor = 0.2 * math.sqrt(max(matrix.shape))
        return newton_schulz(matrix, self.steps), factor


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Approximately the nearest orthogonal matrix, in bf16; singular values are 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


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
            local = all_sum(local, groups.expert_shards if f.is_expert else groups.shards)
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
