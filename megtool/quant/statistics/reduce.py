"""Reduction of activation statistics over ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megtool.model.stacks.hook_locations import HookLocation
from megtool.parallel.collectives import all_max, all_sum, gather_columns, gather_rows
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.statistics.running import RunningStatistics
from megtool.quant.statistics.site_statistics import (
    BINS,
    MAX_SAMPLE_ROWS,
    ActivationStatistics,
    merge_samples,
)


def reduce_statistics(
    local: RunningStatistics | None,
    place: HookLocation,
    width: int,
    groups: ProcessGroups,
    *,
    gram: bool = False,
    sample: bool = False,
) -> ActivationStatistics:
    """Reduce statistics to `[all rows, width]`, the same on every rank of the stage.

    Columns of ranks are concatenated, rows are added, and experts come from the rank that has them;
    `local` is None on the others.
    """
    device = groups.device
    sums = _local_sums(local, place, width, device)
    product = _gram(local, place, width, device) if gram else None
    rows = _rows(local, place, width, device) if sample else None
    is_expert = place.expert is not None
    for group in (place.rows, groups.expert_dp if is_expert else groups.replicas):
        if rows is not None:
            rows = _gather_sample(rows, sums, group)
        sums = sums.all_reduce(group)
        product = None if product is None else all_sum(product, group)
    if is_expert:  # one rank of the ep group has it; the others add zeros
        sums = sums.all_reduce(groups.ep)
        product = None if product is None else all_sum(product, groups.ep)
        if rows is not None:
            padded = rows.new_zeros(MAX_SAMPLE_ROWS, width)
            padded[: len(rows)] = rows
            num_rows = int(all_sum(torch.tensor(len(rows), device=device), groups.ep))
            rows = all_sum(padded, groups.ep)[:num_rows]
    return sums.to_host(product, rows)


class _Sums:
    """Sums by column, counts by bin and tokens in one tensor, and the amax."""

    def __init__(self, sums: Tensor, amax: Tensor) -> None:
        self.sums, self.amax = sums, amax

    def all_reduce(self, group: Group) -> _Sums:
        """Reduce over all ranks of the group."""
        return _Sums(all_sum(self.sums, group), all_max(self.amax, group))

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return int(self.sums[-1])

    def to_host(self, gram: Tensor | None, sample: Tensor | None) -> ActivationStatistics:
        """Copy to the host."""
        width = len(self.amax)
        sums = self.sums.cpu().numpy()
        return ActivationStatistics(
            num_tokens=int(sums[-1]),
            amax=_array(self.amax),
            abs_sum=sums[:width].copy(),
            square_sum=sums[width : 2 * width].copy(),
            histogram=sums[2 * width : 2 * width + BINS].astype(np.int64),
            gram=None if gram is None else _array(gram),
            sample=None if sample is None else _array(sample),
        )


def _local_sums(
    local: RunningStatistics | None, place: HookLocation, width: int, device: torch.device
) -> _Sums:
    """Sums of this rank's rows, all columns. Counts below 2^53 are exact in float64."""
    if local is None:
        sums = torch.zeros(2 * width + BINS + 1, dtype=torch.float64, device=device)
        return _Sums(sums, torch.zeros(width, device=device))
    columns = torch.stack((local.abs_sum, local.square_sum, local.amax.double()))
    columns = gather_site_columns(columns, place)
    counts = torch.cat((local.histogram, local.num_tokens.view(1)))
    counts = torch.cat((all_sum(counts[:-1], place.columns) // place.repeats, counts[-1:]))
    sums = torch.cat((columns[0], columns[1], counts.double()))
    return _Sums(sums, columns[2].float())


def gather_site_columns(x: Tensor, place: HookLocation) -> Tensor:
    """`[..., this rank's columns]` as `[..., all columns]`; of a KV cache keys, then values."""
    if place.columns.size == 1:
        return x
    ranks = gather_columns(x, place.columns).view(*x.shape[:-1], place.columns.size, -1)
    runs = torch.split(ranks[..., :: place.repeats, :], list(place.runs) or x.shape[-1], -1)
    return torch.cat([run.flatten(-2) for run in runs], -1)


def _gram(
    local: RunningStatistics | None, place: HookLocation, width: int, device: torch.device
) -> Tensor:
    if local is None or local.gram is None:
        return torch.zeros(width, width, device=device)
    return gather_rows(local.gram, place.columns)


def _rows(
    local: RunningStatistics | None, place: HookLocation, width: int, device: torch.device
) -> Tensor:
    """All columns of this rank's sampled rows; ranks with other columns sample the same rows."""
    sampled = None if local is None else local.sample
    if sampled is None:
        return torch.zeros(0, width, device=device)
    return gather_site_columns(sampled, place)


def _gather_sample(rows: Tensor, sums: _Sums, group: Group) -> Tensor:
    if group.size == 1:
        return rows
    sizes = torch.tensor([[len(rows), sums.num_tokens]], device=rows.device)
    sizes = gather_rows(sizes, group)
    padded = rows.new_zeros(1, MAX_SAMPLE_ROWS, rows.shape[1])
    padded[0, : len(rows)] = rows
    parts = gather_rows(padded, group).cpu().numpy()
    merged = merge_samples(
        [(parts[i, :num_rows], tokens) for i, (num_rows, tokens) in enumerate(sizes.tolist())]
    )
    return rows[:0] if merged is None else torch.from_numpy(merged).to(rows.device)


def _array(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    out: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = x.float().cpu().numpy()
    return out
