"""All-gather of parameters from the shards of replicas, of FP8 weights as FP8 bytes.

A weight's scales come from the amax of its main parameter over all replicas, so every rank has the
bytes that quantizing the whole main parameter gives. Other parameters of the bucket are sent in
their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.optim.buffers import BucketParam, ParamAndGradBucket
from megtool.optim.flat_shards import Pending, rank_part, start_all_gather
from megtool.optim.fp8.weights import (
    cast_part,
    hold,
    marked_block,
    part_amaxes,
    scale_of_amax,
    scales_shape,
)
from megtool.parallel.collectives import all_max


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of one member that a rank sends; `offset` counts bytes of its message."""

    member: BucketParam
    start: int  # in the bucket
    stop: int
    offset: int
    nbytes: int

    @property
    def is_fp8(self) -> bool:
        return self.member.fp8 is not None

    @property
    def first(self) -> int:
        """The first element of the parameter."""
        return self.start - self.member.start


def _runs(bucket: ParamAndGradBucket, rank: int) -> Iterator[_Run]:
    """What a rank sends, in order; FP8 bytes first, so that everything is aligned."""
    each = bucket.padded_numel // bucket.group.size
    offset, width = 0, bucket.kind.dtype.itemsize
    for fp8 in (True, False):
        offset = -(-offset // width) * width
        for member in bucket.members:
            start, stop = max(member.start, rank * each), min(member.stop, (rank + 1) * each)
            if start < stop and (member.fp8 is not None) is fp8:
                nbytes = (stop - start) * (1 if fp8 else width)
                yield _Run(member, start, stop, offset, nbytes)
                offset += nbytes


@torch.no_grad()
def gather_quantized(
    bucket: ParamAndGradBucket, mains: Sequence[tuple[int, Tensor]], *, tag: int
) -> Pending:
    """Start to gather the parameters of a bucket on every replica, marked weights as FP8.

    `mains` are fp32 ranges of this rank's shard, on any device, each with its offset in the shard.
    After `wait()` marked weights have no values but their FP8 bytes.
    """
    group, device = bucket.group, bucket.grads.device
    runs = [list(_runs(bucket, rank)) for rank in range(group.size)]
    marked = [m for m in bucket.members if m.fp8 is not None]
    low = bucket.shard_range[0]
    values = [_values(mains, run.start - low, run.stop - low) for run in runs[group.rank]]
    amaxes = _Amaxes(marked, device)
    for run, main in zip(runs[group.rank], values, strict=True):
        if run.is_fp8:
            amaxes.add(run, main)
    scales = amaxes.reduce(bucket)
    width = bucket.kind.dtype.itemsize
    size = max((r[-1].offset + r[-1].nbytes for r in runs if r), default=0)
    size = -(-size // width) * width
    message = torch.zeros(group.size * size, dtype=torch.uint8, device=device)
    local_part = rank_part(message, group)
    for run, main in zip(runs[group.rank], values, strict=True):
        member = run.member
        place = local_part[run.offset : run.offset + run.nbytes]
        if run.is_fp8:
            block = marked_block(member.param_info.parameter) or (0, 0)
            shape = member.param_info.parameter.shape
            place.copy_(cast_part(main, run.first, shape, block, scales[id(member)]))
        else:
            place.copy_(main.to(bucket.kind.dtype).view(torch.uint8))
    pending = start_all_gather(message, group, tag=tag) if group.size > 1 and size else None

    @torch.no_grad()
    def unpack() -> Tensor:
        if pending is not None:
            pending.wait()
        for rank, sent in enumerate(runs):
            bytes_ = rank_part(message, group, rank)
            for run in sent:
                member = run.member
                target = member.param if member.fp8 is None else member.fp8.values.data
                count = run.stop - run.start
                flat = target.view(-1)[run.first : run.first + count]
                flat.view(torch.uint8).copy_(bytes_[run.offset : run.offset + run.nbytes])
        for member in marked:
            if member.fp8 is not None:
                amax, values = amaxes.of(member), member.fp8.values
                values.scale_inv.copy_(scales[id(member)].reciprocal().view(values.scale_inv.shape))
                member.fp8.amax.copy_(amax.view(member.fp8.amax.shape))
                hold(member.param_info.parameter, member.fp8)
        return bucket.params

    return Pending([], unpack)


class _Amaxes:
    """The amaxes of all marked weights of a bucket, as one tensor."""

    def __init__(self, marked: Sequence[BucketParam], device: torch.device) -> None:
        self._places: dict[int, tuple[slice, tuple[int, int, int]]] = {}
        self._blocks: dict[int, tuple[int, int]] = {}
        size = 0
        for member in marked:
            parameter = member.param_info.parameter
            block = marked_block(parameter) or (0, 0)
            shape = scales_shape(parameter.shape, block)
            numel = shape[0] * shape[1] * shape[2]
            self._places[id(member)] = slice(size, size + numel), shape
            self._blocks[id(member)] = block
            size += numel
        self._all = torch.zeros(size, device=device)

    def of(self, member: BucketParam) -> Tensor:
        """Those of a weight, of `scales_shape`."""
        place, shape = self._places[id(member)]
        return self._all[place].view(shape)

    def add(self, run: _Run, values: Tensor) -> None:
        """Note the magnitudes of elements of this rank."""
        shape = run.member.param_info.parameter.shape
        own = part_amaxes(values, run.first, shape, self._blocks[id(run.member)])
        total = self.of(run.member)
        torch.maximum(total, own.to(total.device), out=total)

    def reduce(self, bucket: ParamAndGradBucket) -> dict[int, Tensor]:
        """Take the largest of all replicas; returns the scales by member."""
        self._all = all_max(self._all, bucket.group)
        members = [m for m in bucket.members if id(m) in self._places]
        return {id(m): scale_of_amax(self.of(m), self._blocks[id(m)]) for m in members}


def _values(mains: Sequence[tuple[int, Tensor]], start: int, stop: int) -> Tensor:
    """Elements of the shard from its ranges; they may span several."""
    parts = []
    for offset, main in mains:
        first, last = max(start, offset), min(stop, offset + main.numel())
        if first < last:
            parts.append(main[first - offset : last - offset])
    if len(parts) == 1:
        return parts[0]
    device = parts[0].device
    return torch.cat([part.to(device) for part in parts])
