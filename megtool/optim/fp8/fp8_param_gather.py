"""All-gather of parameters from the shards of replicas, of FP8 weights as FP8 bytes.

A weight gets one scale from the amax of its main parameter over all replicas, so every rank has the
bytes that quantizing the whole main parameter gives. Other parameters of the bucket are sent in
their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megtool.kernels.fp8 import (
    DTYPES,
    Kind,
    Quantized,
    amax,
    cast_fp8,
    dequantize,
    scale_from_amax,
)
from megtool.optim.buffers import BucketParam, ParamAndGradBucket
from megtool.optim.flat_shards import Pending, rank_part, start_all_gather
from megtool.parallel.collectives import all_max

_KIND: Kind = "e4m3"
_MARK = "gathered_as_fp8"
_HELD = "held_as_fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8GatheredWeight:
    """A gathered weight in FP8, with the amax of its main parameter."""

    values: Quantized
    amax: Tensor


def mark_for_gather(weight: nn.Parameter) -> None:
    """Mark a weight that is used in FP8 with one scale, and so can be gathered as FP8."""
    setattr(weight, _MARK, True)


def is_marked(weight: Tensor) -> bool:
    """Whether the weight can be gathered as FP8."""
    return getattr(weight, _MARK, False)


def gathered_fp8_weight(weight: Tensor) -> Fp8GatheredWeight | None:
    """The FP8 bytes of a weight, if it was gathered as FP8 and has not changed since."""
    stored: Fp8GatheredWeight | None = getattr(weight, _HELD, None)
    return stored


def forget(weight: Tensor) -> None:
    """Drop the FP8 bytes of a weight that changes."""
    if hasattr(weight, _HELD):
        delattr(weight, _HELD)


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
        return is_marked(self.member.param_info.parameter)


def _runs(bucket: ParamAndGradBucket, rank: int) -> Iterator[_Run]:
    """What a rank sends, in order; FP8 bytes first, so that everything is aligned."""
    each = bucket.params.numel() // bucket.group.size
    offset, width = 0, bucket.params.element_size()
    for fp8 in (True, False):
        offset = -(-offset // width) * width
        for member in bucket.members:
            start, stop = max(member.start, rank * each), min(member.stop, (rank + 1) * each)
            if start < stop and is_marked(member.param_info.parameter) is fp8:
                nbytes = (stop - start) * (1 if fp8 else width)
                yield _Run(member, start, stop, offset, nbytes)
                offset += nbytes


def gather_quantized(
    bucket: ParamAndGradBucket, mains: Sequence[tuple[int, Tensor]], *, tag: int
) -> Pending:
    """Start to gather the parameters of a bucket on every replica, marked weights as FP8.

    `mains` are fp32 ranges of this rank's shard, each with its offset in the shard; other
    parameters are sent as they are in the shard. After `wait()` the parameters have the FP8 values,
    rounded to their dtype, also on the rank that owns them, and `gathered_fp8_weight` returns the
    bytes.
    """
    group = bucket.group
    runs = [list(_runs(bucket, rank)) for rank in range(group.size)]
    marked = [m for m in bucket.members if is_marked(m.param_info.parameter)]
    places = {id(m): i for i, m in enumerate(marked)}
    low = bucket.shard_range[0]
    local_values: dict[int, Tensor] = {
        i: _values(mains, run.start - low, run.stop - low)
        for i, run in enumerate(runs[group.rank])
        if run.is_fp8
    }
    amaxes = torch.zeros(len(marked), device=bucket.params.device)
    for i, values in local_values.items():
        amaxes[places[id(runs[group.rank][i].member)]] = amax(values)
    amaxes = all_max(amaxes, group)
    scales = scale_from_amax(amaxes, _KIND)
    width = bucket.params.element_size()
    size = max((r[-1].offset + r[-1].nbytes for r in runs if r), default=0)
    size = -(-size // width) * width
    message = torch.zeros(group.size * size, dtype=torch.uint8, device=bucket.params.device)
    local_part = rank_part(message, group)
    for i, run in enumerate(runs[group.rank]):
        if run.is_fp8:
            data, _ = cast_fp8(local_values[i], scales[places[id(run.member)]], _KIND)
            local_part[run.offset : run.offset + run.nbytes].copy_(data.view(torch.uint8))
        else:
            values = bucket.params[run.start : run.stop].view(torch.uint8)
            local_part[run.offset : run.offset + run.nbytes].copy_(values)
    pending = start_all_gather(message, group, tag=tag) if group.size > 1 and size else None

    @torch.no_grad()
    def unpack() -> Tensor:
        if pending is not None:
            pending.wait()
        weights = [torch.empty_like(m.param, dtype=DTYPES[_KIND]) for m in marked]
        for rank, sent in enumerate(runs):
            bytes_ = rank_part(message, group, rank)
            for run in sent:
                data = bytes_[run.offset : run.offset + run.nbytes]
                first = run.start - run.member.start
                if run.is_fp8:
                    flat = weights[places[id(run.member)]].view(-1).view(torch.uint8)
                    flat[first : first + run.nbytes].copy_(data)
                elif rank != group.rank:
                    bucket.params[run.start : run.stop].copy_(data.view(bucket.params.dtype))
        for i, member in enumerate(marked):
            values = Quantized(data=weights[i], scale_inv=scales[i].reciprocal())
            member.param.copy_(dequantize(values, member.param.dtype))
            setattr(
                member.param_info.parameter, _HELD, Fp8GatheredWeight(values=values, amax=amaxes[i])
            )
        return bucket.params

    return Pending([], unpack)


def _values(mains: Sequence[tuple[int, Tensor]], start: int, stop: int) -> Tensor:
    """Elements of the shard from its ranges; they may span several."""
    parts = []
    for offset, main in mains:
        first, last = max(start, offset), min(stop, offset + main.numel())
        if first < last:
            parts.append(main[first - offset : last - offset])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
