"""CPU offload of a fraction of the optimizer's state, which is updated on the host.

    optimizer = HybridDeviceOptimizer(ReplicatedOptimizer(named, settings, groups))

`settings.offload_fraction` is the fraction. Its main parameters and states are in host memory
(pinned on CUDA). Gradients are copied to them in chunks, and updated parameters copied back, while
the chunk between is updated. Checkpoints, norms and clipping are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.optim.distributed import BucketShard, DistributedOptimizer
from megtool.optim.muon import Muon
from megtool.optim.offload_streams import (
    ALIGNED,
    OffloadedSegment,
    OffloadStreams,
    slice_segment,
    stored_values,
    write_parameters,
)
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.segments import Segment
from megtool.optim.update_rules import UpdateRule, update_segments

CHUNK_BYTES = 32 * 2**20


class HybridDeviceOptimizer(Optimizer):
    """An optimizer that keeps and updates `settings.offload_fraction` of its state on the CPU.

    It replaces the `inner` optimizer. A DistributedOptimizer is split to 64 elements, a
    ReplicatedOptimizer by whole parameters, as many as fit. What Muon updates stays on the device.
    With the same kernels (if the device is a CPU, too) results do not depend on the fraction by a
    bit: everything is split at multiples of 64 elements, since torch rounds elements after the last
    whole vector differently. CUDA's kernels round differently from the CPU's.

    `chunk_bytes` of fp32 gradient are copied at a time; there are two such buffers each way.

    Raises:
        UsageError: the inner optimizer is of another kind, or has been wrapped already.
    """

    def __init__(
        self, inner: ReplicatedOptimizer | DistributedOptimizer, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if not isinstance(inner, ReplicatedOptimizer | DistributedOptimizer):
            raise UsageError(
                f"the state of a {type(inner).__name__} cannot be offloaded",
                hint="wrap a replicated or distributed optimizer",
            )
        if any(isinstance(s, OffloadedSegment) for s in inner.segments):
            raise UsageError("the state of this optimizer is offloaded already")
        self.inner = inner
        self.settings, self.groups, self.param_infos = (
            inner.settings,
            inner.groups,
            inner.param_infos,
        )
        self.param_groups, self.group_of = inner.param_groups, inner.group_of
        self._facts_by_name = inner._facts_by_name
        self.updates, self.scaler, self.num_steps = inner.updates, inner.scaler, inner.num_steps
        self._num_labels, self._rates = None, {}
        movable = sum(s.numel for s in inner.segments if self._may_move(s))
        self._num_unplaced = round(self.settings.offload_fraction * movable)
        if isinstance(inner, DistributedOptimizer):
            inner.shards = [self._place_shard(shard) for shard in inner.shards]
            inner.segments = [s for shard in inner.shards for _, s in shard.segments]
        else:
            inner.segments = [self._place_whole(s) for s in inner.segments]
        self.segments = inner.segments
        self._streams = OffloadStreams(self.offloaded_segments, chunk_bytes // 4)
        self._is_written = True

    @property
    def offloaded_segments(self) -> list[OffloadedSegment]:
        """The segments that are on the host, in whole or in part."""
        return [s for s in self.segments if isinstance(s, OffloadedSegment)]

    @property
    def state_segments(self) -> list[Segment]:
        """The parts that hold main parameters and states."""
        out: list[Segment] = []
        for s in self.segments:
            parts = (s.host_part, s.device_part) if isinstance(s, OffloadedSegment) else (s,)
            out += [part for part in parts if part is not None]
        return out

    @property
    def bucket_size(self) -> int | None:
        return self.inner.bucket_size

    @property
    def sums_in_fp32(self) -> bool:
        return self.inner.sums_in_fp32

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def begin(self, num_microbatches: int) -> None:
        self.inner.begin(num_microbatches)

    def sum_in_place(self) -> None:
        self.inner.sum_in_place()

    def reduce_gradients(self) -> None:
        self.inner.reduce_gradients()

    def update_segments(self, segments: list[Segment]) -> None:
        """See `Optimizer.update_segments`; parameters of shared segments are written as well.

        The device's part goes first: on CUDA it runs while the host works.
        """
        inner, shared = self.inner, [s for s in segments if isinstance(s, OffloadedSegment)]
        inner.num_steps, inner._rates = self.num_steps, self._rates
        self._streams.open(shared)
        inner.update_segments([s for s in segments if not isinstance(s, OffloadedSegment)])
        for segment in shared:
            if segment.device_part is not None and segment.grad is not None:
                segment.device_part.grad = segment.grad[segment.host_part.numel :]
                self._update(segment.device_part)
                write_parameters(segment.device_part, stored_values(segment.device_part))
                segment.device_part.grad = None
        self._streams.run(shared, self._update)
        self._is_written = True

    def publish(self) -> None:
        if not self._is_written:
            for segment in self.offloaded_segments:
                for part in (segment.host_part, segment.device_part):
                    if part is not None:
                        write_parameters(part, stored_values(part))
            self._is_written = True
        self.inner.publish()

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are those of the last step."""
        if isinstance(self.inner, DistributedOptimizer):
            self.inner.wait_for_parameters()

    @torch.no_grad()
    def load(self, read: Callable[[str, str], Tensor]) -> None:
        self.wait_for_parameters()
        self._is_written = False
        super().load(read)

    @torch.no_grad()
    def reload_parameters(self) -> None:
        if isinstance(self.inner, DistributedOptimizer):
            self.inner.adopt_parameters()
        super().reload_parameters()
        if isinstance(self.inner, DistributedOptimizer) and self.inner.fp8_param_gather:
            self.publish()
            self.wait_for_parameters()

    def close(self) -> None:
        """Take the inner optimizer's hooks off."""
        if isinstance(self.inner, DistributedOptimizer):
            self.inner.close()

    def _update(self, part: Segment) -> None:
        """Update a part of a segment, with its gradient on the same device."""
        lr, weight_decay = self.rates(part.group)
        update: UpdateRule = self.updates[part.group.update]
        update_segments(update, [part], lr=lr, weight_decay=weight_decay, step=self.num_steps)

    # Placement.

    def _may_move(self, segment: Segment) -> bool:
        return not isinstance(self.updates[segment.group.update], Muon)

    def _place_shard(self, shard: BucketShard) -> BucketShard:
        placed = []
        for offset, segment in shard.segments:
            count = min(self._num_unplaced, segment.numel)
            if count < segment.numel:
                count -= count % ALIGNED
            placed.append((offset, self._place(segment, count)))
        # Segments of a bucket share a storage: copy what stays, to free the others.
        if any(isinstance(s, OffloadedSegment) for _, s in placed):
            for _, segment in placed:
                _own_storage(
                    segment.device_part if isinstance(segment, OffloadedSegment) else segment
                )
        return replace(shard, segments=tuple(placed))

    def _place_whole(self, segment: Segment) -> Segment:
        return self._place(segment, segment.numel if segment.numel <= self._num_unplaced else 0)

    def _place(self, segment: Segment, count: int) -> Segment:
        """A segment with its first `count` elements on the host."""
        device = segment.device
        if not count or not self._may_move(segment):
            _make_states(segment)
            return segment
        self._num_unplaced -= count
        device_part = (
            slice_segment(segment, count, segment.numel) if count < segment.numel else None
        )
        if device_part is not None:
            _make_states(device_part)
        return OffloadedSegment(
            group=segment.group,
            spans=segment.spans,
            replicated=segment.replicated,
            host_part=_copy_to_host(slice_segment(segment, 0, count)),
            device_part=device_part,
            grad_device=device,
        )


def _make_states(segment: Segment) -> None:
    """Allocate a segment's states (zeros) that have no memory yet."""
    for name, tensor in segment.states.items():
        if tensor.is_meta:
            segment.states[name] = torch.zeros_like(tensor, device=segment.device)


def _own_storage(segment: Segment | None) -> None:
    """Copy tensors that share their storage with other segments, except the parameter itself."""
    if segment is None or not segment.spans:
        return
    if segment.main is not None and segment.spans[0].param_info.parameter.dtype != torch.float32:
        segment.main = segment.main.clone()
    if segment.low is not None:
        segment.low = segment.low.clone()


def _copy_to_host(part: Segment) -> Segment:
    """A copy of a part of a segment in host memory, pinned if the device is CUDA."""
    is_pinned = part.device.type == "cuda"

    def to_host(tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return copy.zero_() if tensor.is_meta else copy.copy_(tensor)

    return Segment(
        group=part.group,
        spans=part.spans,
        main=None if part.main is None else to_host(part.main),
        high=None if part.high is None else to_host(part.high),
        low=None if part.low is None else to_host(part.low),
        replicated=part.replicated,
        states={name: to_host(tensor) for name, tensor in part.states.items()},
    )
