"""A rank's parameters and gradients in Megatron's flat buffers, divided into buckets.

There is one buffer for each model chunk, dtype of parameters, dtype of gradients, and for dense
parameters and experts separately. Parameters are in the reverse of the order that Megatron's
modules register them in (`megtool.tensors.registration_order`), at the offsets of
`megtool.tensors.buckets`. A stack of experts is one parameter here; Megatron's buffers have its
matrices in reverse, one by one.
Source: megatron-core 0.16.1, `distributed/{distributed_data_parallel,param_and_grad_buffer}.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megtool.errors import MappingError, UsageError
from megtool.optim.flat_shards import rank_part
from megtool.optim.fp8.weights import Fp8Weight, make_fp8_weight, marked_block
from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Span
from megtool.parallel.process_groups import ALONE, Group
from megtool.tensors.buckets import ALIGNMENT, lay_out, padded
from megtool.tensors.registration_order import ORDERS, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferKey:
    """What the parameters of a buffer have in common."""

    chunk: int
    is_expert: bool
    dtype: torch.dtype
    grad_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketParam:
    """A parameter of a bucket, from element `start` of the bucket on.

    `param` and `grad` are views of the buffer, of the parameter's shape. A weight that is FP8 alone
    has `fp8` in place of values in `param`.
    """

    param_info: ParamInfo
    start: int
    param: Tensor
    grad: Tensor
    fp8: Fp8Weight | None = None

    @property
    def stop(self) -> int:
        """The element of the bucket after its last one."""
        return self.start + self.grad.numel()

    def adopt(self) -> None:
        """Move the parameter's values into the buffer, if it is not a view of it."""
        parameter = self.param_info.parameter
        if self.fp8 is None and parameter.data_ptr() != self.param.data_ptr():
            self.param.copy_(parameter.data)
            parameter.data = self.param


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamAndGradBucket:
    """A part of a buffer that is communicated at once, of which each rank of `group` owns an equal
    shard. Ranks of `instances` own the same shard, of different groups of replicas.

    `params` and `grads` are views of the buffer, padding included, and `param_shard` this rank's
    elements of `params`; `numel` is without the padding at the end. Members come in the order of
    the buffer. Where weights are FP8 alone, `params` are the other parameters, without the padding
    of the bucket, `codes` the bytes of weights, and no part of `params` is a rank's.
    """

    kind: BufferKey
    index: int
    numel: int
    members: tuple[BucketParam, ...]
    params: Tensor
    grads: Tensor
    group: Group
    instances: Group
    param_shard: Tensor
    codes: Tensor | None = None

    @property
    def padded_numel(self) -> int:
        """Elements with the padding at the end."""
        return self.grads.numel()

    @property
    def label(self) -> str:
        """A readable name: its index, and its first and last parameter."""
        first, last = self.members[0].param_info.name, self.members[-1].param_info.name
        return f"bucket {self.index} ({first} ... {last})"

    @property
    def shard_range(self) -> tuple[int, int]:
        """The range of the bucket's elements that this rank owns, padding included."""
        each = self.padded_numel // self.group.size
        return self.group.rank * each, (self.group.rank + 1) * each

    def spans(self) -> list[Span]:
        """The spans of members in this rank's shard, in order; `offset` counts in the shard."""
        low, high = self.shard_range
        out = []
        for member in self.members:
            begin, end = max(member.start, low), min(member.stop, high)
            if begin < end:
                start, stop = begin - member.start, end - member.start
                out.append(
                    Span(param_info=member.param_info, start=start, stop=stop, offset=begin - low)
                )
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamAndGradBuffer:
    """Parameters and gradients of one kind; `buckets` are parts of them."""

    kind: BufferKey
    params: Tensor
    grads: Tensor
    buckets: tuple[ParamAndGradBucket, ...]


@torch.no_grad()
def make_buffer(
    kind: BufferKey,
    facts: Sequence[ParamInfo],
    group: Group,
    bucket_size: int | None,
    *,
    instances: Group = ALONE,
    for_bandwidth: bool = False,
    in_fp8: bool = False,
) -> ParamAndGradBuffer:
    """Move parameters, in registration order, into a new buffer, of which they become views.

    Their values stay. `bucket_size` is in elements; None makes one bucket, plus those of tied
    embeddings. `for_bandwidth`: see `padded`. With `in_fp8` marked weights get memory for FP8
    bytes, and keep their own until they are gathered.

    Raises:
        UsageError: a parameter is not loaded yet.
    """
    for f in facts:
        if f.parameter.is_meta:
            raise UsageError(
                f"the parameter {f.name} of shape {list(f.parameter.shape)} is not loaded yet",
                hint="load a checkpoint into the model before its optimizer is made",
            )
    numels = [f.parameter.numel() for f in facts]
    slots, sizes = lay_out(numels, [f.is_tied for f in facts], bucket_size=bucket_size)
    widths = [padded(size, group.size, for_bandwidth=for_bandwidth) for size in sizes]
    offsets = [0, *accumulate(widths)]
    device = facts[0].parameter.device
    is_fp8 = [in_fp8 and marked_block(f.parameter) is not None for f in facts]
    wide = [n + -n % ALIGNMENT for n in numels]
    num_codes = sum(n for n, fp8 in zip(wide, is_fp8, strict=True) if fp8)
    codes = torch.zeros(num_codes, dtype=torch.uint8, device=device)
    num_params = sum(wide) - num_codes if in_fp8 else offsets[-1]
    params = torch.zeros(num_params, dtype=kind.dtype, device=device)
    grads = torch.zeros(offsets[-1], dtype=kind.grad_dtype, device=device)
    members: list[list[BucketParam]] = [[] for _ in sizes]
    ends = [[0, 0] for _ in range(len(sizes) + 1)]  # of plain parameters and codes, by bucket
    for f, slot, fp8 in zip(reversed(facts), reversed(slots), reversed(is_fp8), strict=True):
        begin, parameter = offsets[slot.bucket] + slot.start, f.parameter
        grad = grads[begin : begin + slot.numel].view(parameter.shape)
        fp8_weight = None
        if in_fp8:
            before, after = ends[slot.bucket], ends[slot.bucket + 1]
            after[:] = [max(a, b) for a, b in zip(before, after, strict=True)]
            begin = after[fp8]
            after[fp8] += slot.numel + -slot.numel % ALIGNMENT
        if fp8:
            fp8_weight = make_fp8_weight(parameter, codes[begin : begin + slot.numel])
            param = fp8_weight.placeholder.expand(parameter.shape)
        else:
            param = params[begin : begin + slot.numel].view(parameter.shape)
        member = BucketParam(param_info=f, start=slot.start, param=param, grad=grad, fp8=fp8_weight)
        member.adopt()
        members[slot.bucket].append(member)
    buckets = tuple(
        ParamAndGradBucket(
            kind=kind,
            index=i,
            numel=size,
            members=tuple(members[i]),
            params=params[ends[i][0] : ends[i + 1][0]]
            if in_fp8
            else params[offsets[i] : offsets[i + 1]],
            grads=grads[offsets[i] : offsets[i + 1]],
            group=group,
            instances=instances,
            param_shard=params[:0]
            if in_fp8
            else rank_part(params[offsets[i] : offsets[i + 1]], group),
            codes=codes[ends[i][1] : ends[i + 1][1]] if in_fp8 else None,
        )
        for i, size in enumerate(sizes)
    )
    return ParamAndGradBuffer(kind=kind, params=params, grads=grads, buckets=buckets)


def in_registration_order(facts: Sequence[ParamInfo], order: Order = ORDERS[0]) -> list[ParamInfo]:
    """Parameters as Megatron's modules register them.

    If a name is not Megatron's (an adapter's, another model's), the given order is kept.
    """
    try:
        places = [order.position(f.name) for f in facts]
    except MappingError:
        return list(facts)
    return [facts[i] for i in sorted(range(len(facts)), key=places.__getitem__)]
