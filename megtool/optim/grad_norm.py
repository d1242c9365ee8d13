"""The norm of the gradient over all ranks, its zeros, and whether it is finite.

As in Megatron, tied embeddings are counted on the first stage, parameters that all tp ranks have on
the first of them, and experts over their own ranks. Each element is counted by exactly one process,
so one sum over the world gives the joint norm of dense parameters and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Segment
from megtool.parallel.process_groups import ProcessGroups


def is_counted_on_rank(facts: ParamInfo, groups: ProcessGroups, *, replicated: bool) -> bool:
    """Whether this process counts its part of a parameter."""
    if facts.is_shared_copy:
        return False
    tp = groups.etp if facts.is_expert else groups.tp
    replicas = groups.expert_dp if facts.is_expert else groups.replicas
    instances = groups.expert_instances if facts.is_expert else groups.instances
    first_of_tp = not facts.is_tp_duplicate or tp.is_first
    return first_of_tp and (replicas if replicated else instances).is_first


def local_statistics(
    segments: Sequence[Segment], groups: ProcessGroups, *, count_zeros: bool = False
) -> Tensor:
    """This process' part of the sums over the world: three float64 numbers on its device.

    They are whether some gradient is not finite (0 or 1, of all segments), the sum of squares, and
    the number of zeros (0 unless `count_zeros`).
    """
    counted: list[Tensor] = []
    uncounted: list[Tensor] = []
    zeros: list[Tensor] = []
    for segment in segments:
        if segment.grad is None:
            continue
        for start, stop, is_counted in _runs(segment, groups):
            (counted if is_counted else uncounted).append(segment.grad[start:stop])
        if count_zeros:
            zeros += [
                span.stop - span.start - torch.count_nonzero(segment.grad[span.offset : span.end])
                for span in segment.spans
                if is_counted_on_rank(span.param_info, groups, replicated=segment.replicated)
            ]
    device = groups.device
    out = torch.zeros(3, dtype=torch.float64, device=device)
    norm = _norm(counted)
    if norm is not None:
        out[0] += ~norm.isfinite()
        out[1] = norm.to(device).double().square()
    uncounted_norm = _norm(uncounted)
    if uncounted_norm is not None:
        out[0] += ~uncounted_norm.isfinite()
    if zeros:
        out[2] = torch.stack([z.to(device) for z in zeros]).sum()
    return out


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient: max_norm / (norm + 1e-6) in fp32, at most 1."""
    return float((max_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0))


def find_nonfinite(segments: Sequence[Segment], names: Sequence[str]) -> str | None:
    """The last of `names` (in the order of the forward pass) whose gradient has a NaN or Inf: the
    first in the backward pass. None if there is none."""
    bad = {
        span.param_info.name
        for s in segments
        if s.grad is not None
        for span in s.spans
        if not torch.linalg.vector_norm(s.grad[span.offset : span.end]).isfinite()
    }
    return next((name for name in reversed(names) if name in bad), None)


def first_nonfinite_of_ranks(
    local_name: str | None, names: Sequence[str], groups: ProcessGroups
) -> str | None:
    """The first name in the backward pass of those given by all ranks, with its rank: that of the
    last stage. Every rank calls it."""
    world = groups.world
    if world.handle is None:
        return local_name
    entry = None if local_name is None else (groups.pp.rank, names.index(local_name), local_name)
    all_ranks: list[tuple[int, int, str] | None] = [None] * world.size
    dist.all_gather_object(all_ranks, entry, group=world.handle)
    entries = [
        (entry_of_rank[:2], -rank, entry_of_rank[2])
        for rank, entry_of_rank in enumerate(all_ranks)
        if entry_of_rank is not None
    ]
    if not entries:
        return None
    _, rank, name = max(entries)
    return f"{name} (rank {-rank})"


def _runs(segment: Segment, groups: ProcessGroups) -> list[tuple[int, int, bool]]:
    """Adjacent spans that are counted on this rank, or are not, merged; padding is zeros."""
    runs: list[tuple[int, int, bool]] = []
    for span in segment.spans:
        is_counted = is_counted_on_rank(span.param_info, groups, replicated=segment.replicated)
        if runs and runs[-1][2] == is_counted and span.offset >= runs[-1][1]:
            runs[-1] = (runs[-1][0], span.end, is_counted)
        else:
            runs.append((span.offset, span.end, is_counted))
    return runs


def _norm(grads: list[Tensor]) -> Tensor | None:
    """The joint fp32 norm of tensors; not finite if one of them is not.

    On a CPU torch sums all squares of a tensor sequentially in fp32, which loses precision (0.2 %
    of the norm of 40 million numbers), so long tensors are summed by rows.
    """
    if not grads:
        return None
    short: list[Tensor] = []
    norms: list[Tensor] = []
    for g in grads:
        rows = g.numel() // _ROW if g.device.type == "cpu" and g.numel() > _ROW else 0
        if rows:
            norms.append(torch.linalg.vector_norm(g[: rows * _ROW].view(rows, _ROW), dim=1))
        if g.numel() > rows * _ROW:
            short.append(g[rows * _ROW :])
    if short:
        norms.append(torch.stack(torch._foreach_norm(short, 2.0)))
    device = norms[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.cat([n.to(device) for n in norms]))
    return norm


_ROW = 2**16
