"""The distributed optimizer: gradients, main parameters and states are sharded over replicas.

Every replica has all parameters of its rank in Megatron's flat buffers. It reduces the gradients of
its shard of every bucket, updates that, and gathers parameters from the others. Dense parameters
are sharded over `ProcessGroups.shards`, experts over `ProcessGroups.expert_shards`: all replicas,
or those of an instance. Instances sum the gradients of their shards, and update them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.optim.buffers import (
    BufferKey,
    ParamAndGradBucket,
    ParamAndGradBuffer,
    in_registration_order,
    make_buffer,
)
from megtool.optim.config import OptimizerConfig
from megtool.optim.flat_shards import Pending
from megtool.optim.fp8.weights import marked_block, release
from megtool.optim.fp8_param_gather import gather_quantized
from megtool.optim.grad_reduce import GradReduce
from megtool.optim.optimizer import Optimizer
from megtool.optim.param_gather import ParamGather
from megtool.optim.param_groups import ParamInfo
from megtool.optim.segments import Segment, Span
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.buckets import default_bucket_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketShard:
    """The part of a bucket that this process updates: offsets in its shard, and segments."""

    bucket: ParamAndGradBucket
    segments: tuple[tuple[int, Segment], ...]


class DistributedOptimizer(Optimizer):
    """See `Optimizer` for the protocol of a step.

    `chunks` are the modules with the parameters, a rank's virtual chunks in order. Each has its own
    buffers, and with `overlap_param_gather` they wait for their parameters, which may still be
    gathered after `step`. To read or save parameters without running the modules, call
    `wait_for_parameters` first.

    Gradients are summed in fp32. With `grad_reduce_in_bf16` they are summed within a rank in the
    parameters' dtype, and in fp32 over ranks.

    With `fp8_param_gather` weights that are used in FP8 are FP8 alone, and gathered as bytes.

    Raises (by `__init__`, in addition to those of `Optimizer`):
        UsageError: a parameter has no memory yet, or parameters cannot be gathered as FP8.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerConfig,
        groups: ProcessGroups,
        *,
        chunks: Sequence[nn.Module] = (),
        fp8_param_gather: bool = False,
        loss_scale_unit: float = 1.0,
    ) -> None:
        super().__init__(named_parameters, settings, groups, loss_scale_unit=loss_scale_unit)
        self.fp8_param_gather = fp8_param_gather
        if fp8_param_gather:
            _check_fp8(self.param_infos, settings)
        self.buffers = self._make_buffers(chunks)
        # Backward passes fill the last chunk first; forward passes need the first one first.
        backwards = sorted(self.buffers, key=lambda b: -b.kind.chunk)
        buckets = [bucket for buffer in backwards for bucket in buffer.buckets]
        self.grad_reduce = GradReduce(
            buckets,
            overlap=settings.overlap_grad_reduce,
            in_fp32=settings.grad_reduce_in_bf16,
            fuse=settings.gradient_accumulation_fusion,
        )
        self.param_gather = ParamGather(
            buckets[::-1],
            chunks,
            overlap=settings.overlap_param_gather,
            begin=self._gather_as_fp8 if fp8_param_gather else None,
        )
        self.shards = [
            self._make_shard(bucket) for buffer in self.buffers for bucket in buffer.buckets
        ]
        self.set_segments([segment for shard in self.shards for _, segment in shard.segments])
        if self.fp8_param_gather:
            self.publish()
            self.param_gather.wait()

    @property
    def bucket_size(self) -> int | None:
        """See `Optimizer.bucket_size`: as Megatron chooses, several where reductions overlap."""
        if not self.settings.overlap_grad_reduce:
            return None
        return self.settings.ddp_bucket_size or default_bucket_size(self.groups.replicas.size)

    @property
    def sums_in_fp32(self) -> bool:
        return not self.settings.grad_reduce_in_bf16

    def zero_grad(self) -> None:
        self.grad_reduce.clear()
        for segment in self.segments:
            segment.grad = None

    def begin(self, num_microbatches: int) -> None:
        self.grad_reduce.begin(num_microbatches)
        self.param_gather.forget_calls()

    def sum_in_place(self) -> None:
        """See `Optimizer.sum_in_place`.

        Raises:
            UsageError: passes would have to start or wait for communication.
        """
        if self.param_gather.overlap:
            raise UsageError("passes that wait for parameters cannot be a graph")
        self.grad_reduce.sum_in_place()

    def reduce_gradients(self) -> None:
        self.param_gather.learn()
        self.param_gather.wait()
        totals = self.grad_reduce.finish()
        for shard in self.shards:
            for offset, segment in shard.segments:
                segment.grad = totals[shard.bucket][offset : offset + segment.numel]

    def publish(self) -> None:
        into, mains = [], []
        for shard in () if self.fp8_param_gather else self.shards:
            params = shard.bucket.param_shard
            for offset, segment in shard.segments:
                place = params[offset : offset + segment.numel]
                # fp32 parameters are their own main parameters, unless those are elsewhere
                if segment.main is not None and segment.main.data_ptr() != place.data_ptr():
                    into.append(place)
                    mains.append(segment.main)
        if into:
            torch._foreach_copy_(into, mains)
        self.param_gather.start()

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are those of the last step."""
        self.param_gather.wait()

    def load(self, read: Callable[[str, str], Tensor]) -> None:
        self.param_gather.wait()
        super().load(read)

    def reload_parameters(self) -> None:
        """See `Optimizer.reload_parameters`; FP8 weights are cast anew."""
        self.adopt_parameters()
        super().reload_parameters()
        if self.fp8_param_gather:
            self.publish()
            self.param_gather.wait()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Move parameters that are not views of the buffers into them."""
        self.param_gather.wait()
        for shard in self.shards:
            for member in shard.bucket.members:
                member.adopt()

    def close(self) -> None:
        """Remove the hooks of parameters and modules; parameters stay in their buffers, and those
        that are FP8 alone get values in their own dtype."""
        self.param_gather.close()
        self.grad_reduce.close()
        for shard in self.shards:
            for member in shard.bucket.members:
                if member.fp8 is not None:
                    release(member.param_info.parameter)

    def _gather_as_fp8(self, bucket: ParamAndGradBucket, tag: int) -> Pending:
        shard = next(s for s in self.shards if s.bucket is bucket)
        mains = [
            (offset + start, main) for offset, s in shard.segments for start, main in s.main_parts()
        ]
        return gather_quantized(bucket, mains, tag=tag)

    def _make_buffers(self, chunks: Sequence[nn.Module]) -> list[ParamAndGradBuffer]:
        """Make the buffers by chunk, dense before experts, and by dtypes in order of appearance."""
        chunk_of = {id(p): i for i, module in enumerate(chunks) for p in module.parameters()}
        kinds: dict[BufferKey, list[ParamInfo]] = {}
        for f in in_registration_order(self.param_infos):
            dtype = f.parameter.dtype
            kind = BufferKey(
                chunk=chunk_of.get(id(f.parameter), 0),
                is_expert=f.is_expert,
                dtype=dtype,
                grad_dtype=torch.float32 if self.sums_in_fp32 else dtype,
            )
            kinds.setdefault(kind, []).append(f)
        order = sorted(kinds, key=lambda kind: (kind.chunk, kind.is_expert))
        return [
            make_buffer(
                kind,
                kinds[kind],
                self.groups.expert_shards if kind.is_expert else self.groups.shards,
                self._bucket_size(kind),
                instances=self.groups.expert_instances if kind.is_expert else self.groups.instances,
                for_bandwidth=self.settings.ddp_pad_buckets_for_high_nccl_busbw,
                in_fp8=self.fp8_param_gather,
            )
            for kind in order
        ]

    def _bucket_size(self, kind: BufferKey) -> int | None:
        """Elements of a bucket as in Megatron; None is one bucket for all.

        Later stages and chunks have one bucket: their communication overlaps with the first ones.
        """
        return None if self.groups.pp.rank or kind.chunk else self.bucket_size

    def _make_shard(self, bucket: ParamAndGradBucket) -> BucketShard:
        """The segments of a bucket: adjacent spans with the same settings."""
        spans = bucket.spans()
        used = spans[-1].end if spans else 0
        main: Tensor | None = None
        low: Tensor | None = None
        params = bucket.params if self.fp8_param_gather else bucket.param_shard
        if self.fp8_param_gather:  # values that have no other place
            main = torch.zeros(used, device=bucket.grads.device)
            for span in spans:
                values = span.param_info.parameter.detach().flatten()[span.start : span.stop]
                main[span.offset : span.end].copy_(values)
        elif params.dtype != torch.float32:
            if self.settings.store_param_remainders:
                low = torch.zeros(used, dtype=torch.int16, device=params.device)
            else:
                main = params[:used].float()
        segments = []
        for run in self._runs(spans):
            start, end = run[0].offset, run[-1].end
            extent = slice(start, end)
            segment = Segment(
                group=self.group_of[run[0].param_info.name],
                spans=tuple(
                    Span(
                        param_info=s.param_info, start=s.start, stop=s.stop, offset=s.offset - start
                    )
                    for s in run
                ),
            )
            if low is not None:
                segment.high, segment.low = params[extent], low[extent]
            else:
                segment.main = (params if main is None else main)[extent]
            segments.append((start, segment))
        return BucketShard(bucket=bucket, segments=tuple(segments))

    def _runs(self, spans: Sequence[Span]) -> list[list[Span]]:
        runs: list[list[Span]] = []
        for span in spans:
            group = self.group_of[span.param_info.name]
            if not runs or self.group_of[runs[-1][-1].param_info.name] is not group:
                runs.append([])
            runs[-1].append(span)
        return runs


def _check_fp8(facts: Sequence[ParamInfo], settings: OptimizerConfig) -> None:
    """Check that weights can be FP8 alone."""
    if all(marked_block(f.parameter) is None for f in facts):
        raise UsageError(
            "no parameter is used in FP8 that could be gathered as FP8",
            hint="--fp8-param-gather needs --fp8-recipe delayed, tensorwise or blockwise",
        )
    if settings.store_param_remainders:
        raise UsageError(
            "remainders are the low bits of parameters in bfloat16, and FP8 weights have none",
            hint="--fp8-param-gather without --store-param-remainders",
        )
