"""Reduction of gradients: from autograd through buckets to the shards of replicas."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megtool.errors import UsageError
from megtool.kernels.wgrad_accumulation import GradientSum, set_gradient_sums
from megtool.optim.buffers import BucketParam, ParamAndGradBucket
from megtool.optim.flat_shards import Pending, new_tag, start_reduce_scatters, sum_in_place


@dataclass(slots=True, kw_only=True, eq=False)
class _Arrival:
    """The state of a parameter's gradient in this step.

    `empty`: no gradient has arrived, so the buffer has that of the step before. `per_pass`: how
    often one arrived in a backward pass of the first step; more than 1 if a pass consists of
    several.
    """

    member: BucketParam
    of: _Progress
    empty: bool = True
    count: int = 0
    per_pass: int | None = None
    expected: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """A bucket in this step: its parameters, the number of missing gradients, and its sum."""

    bucket: ParamAndGradBucket
    queue: list[_Progress]
    tag: int
    arrivals: list[_Arrival] = field(default_factory=list)
    missing: int = 0
    pending: Pending | None = None


class _GradientSum(GradientSum):
    """A parameter's place in its buffer, for layers that add their products themselves."""

    def __init__(self, arrival: _Arrival, reduction: GradReduce) -> None:
        self._arrival, self._reduction = arrival, weakref.ref(reduction)

    def begin(self) -> tuple[Tensor, bool]:
        if (alive := self._reduction()) is not None:
            alive.require_open(self._arrival)
        return self._arrival.member.grad, self._arrival.empty

    def end(self) -> None:
        if (alive := self._reduction()) is not None:
            alive.count(self._arrival)


class GradReduce:
    """Sums gradients over micro batches, in the buffers, and over replicas, bucket by bucket.

    A hook takes every gradient as soon as autograd has it, and `parameter.grad` stays None. With
    `fuse` parameters have a `GradientSum` (`megtool.kernels.wgrad_accumulation`): layers that know
    of it add their weights' gradients to the buffer themselves. With
    `overlap` a bucket is sent when all of its gradients of the `begin` number of backward passes
    have arrived, and all earlier buckets in the queue are sent: all replicas send in the same
    order, whatever order their gradients arrive in. The first step counts how often a parameter's
    gradient arrives in a pass, and therefore sends at its end. Gradients that have not arrived at
    the end of a step are zero, or complete: an unused parameter only reduces the overlap. Without
    `overlap` everything is sent at the end, all buckets of a communicator as one collective where
    the backend can (NCCL); the result has the same bits. Instances of replicas then sum their
    shards.

    After `sum_in_place` every gradient is added in the same way, also the first one of a step.

    `buckets` are in the order in which backward passes fill them.
    """

    def __init__(
        self,
        buckets: Sequence[ParamAndGradBucket],
        *,
        overlap: bool,
        in_fp32: bool,
        fuse: bool = False,
    ) -> None:
        self.overlap, self.in_fp32 = overlap, in_fp32
        self.sent: list[ParamAndGradBucket] = []
        """The buckets sent in this step, in order."""
        self._passes = 1
        self._in_place = False
        self._handles: list[RemovableHandle] = []
        self._all: list[_Progress] = []
        fused: list[tuple[nn.Parameter, GradientSum]] = []
        queues: dict[int, list[_Progress]] = {}  # one for each communicator
        for bucket in buckets:
            queue = queues.setdefault(id(bucket.group.handle), [])
            progress = _Progress(bucket=bucket, queue=queue, tag=new_tag())
            for member in bucket.members:
                arrival = _Arrival(member=member, of=progress)
                progress.arrivals.append(arrival)
                self._handles.append(self._hook(arrival))
                if fuse:
                    fused.append((member.param_info.parameter, _GradientSum(arrival, self)))
            queue.append(progress)
            self._all.append(progress)
        self._unfuse = set_gradient_sums(self, fused)

    def sum_in_place(self) -> None:
        """Start steps with zeroed buffers from now on, and send nothing before their end.

        Raises:
            UsageError: passes send gradients.
        """
        if self.overlap:
            raise UsageError("passes that send gradients cannot be a graph")
        self._in_place = True
        self.clear()

    @torch.no_grad()
    def clear(self) -> None:
        """Clear the gradients."""
        self._end()
        self.sent = []
        for progress in self._all:
            if self._in_place:
                progress.bucket.grads.zero_()
            for arrival in progress.arrivals:
                arrival.empty, arrival.count = not self._in_place, 0
                arrival.member.param_info.parameter.grad = None

    def begin(self, num_passes: int) -> None:
        """Begin a step of so many backward passes."""
        self._passes = num_passes
        for progress in self._all:
            for arrival in progress.arrivals:
                is_counted = self.overlap and arrival.per_pass is not None
                arrival.expected = num_passes * (arrival.per_pass or 1) if is_counted else None
            progress.missing = len(progress.arrivals)

    @torch.no_grad()
    def finish(self) -> dict[ParamAndGradBucket, Tensor]:
        """Each bucket's shard of the sum (fp32), after the last backward pass."""
        unsent: dict[int, list[_Progress]] = {}
        for progress in self._all:
            if progress.pending is None:
                unsent.setdefault(id(progress.bucket.group.handle), []).append(progress)
        for together in unsent.values():
            self._send(together)
        for progress in self._all:
            for arrival in progress.arrivals:
                if arrival.per_pass is None:
                    arrival.per_pass = max(1, math.ceil(arrival.count / self._passes))
        sums = {p.bucket: p.pending.wait().float() for p in self._all if p.pending is not None}
        for instances in {id(b.instances.handle): b.instances for b in sums}.values():
            handle = instances.handle
            sum_in_place([s for b, s in sums.items() if b.instances.handle is handle], instances)
        return sums

    def close(self) -> None:
        """Remove the hooks: gradients stay in `parameter.grad` from now on."""
        self._end()
        self._unfuse()
        for handle in self._handles:
            handle.remove()

    def _hook(self, arrival: _Arrival) -> RemovableHandle:
        # A weak reference, so that the model does not keep the optimizer alive.
        reduction = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            if (alive := reduction()) is not None:
                alive._take(arrival, parameter)

        parameter = arrival.member.param_info.parameter
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return handle

    @torch.no_grad()
    def _take(self, arrival: _Arrival, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        self.require_open(arrival)
        if arrival.empty:
            arrival.member.grad.copy_(grad)
        else:
            arrival.member.grad.add_(grad)
        self.count(arrival)

    def require_open(self, arrival: _Arrival) -> None:
        """Refuse a gradient after its bucket was sent.

        Raises:
            UsageError: it was sent.
        """
        if arrival.of.pending is not None:
            raise UsageError(
                f"a gradient of {arrival.member.param_info.name} arrived after its bucket was sent",
                hint="call zero_grad and begin before the first backward pass of a step, with the "
                f"number of passes; this step has {self._passes}",
            )

    @torch.no_grad()
    def count(self, arrival: _Arrival) -> None:
        """Note that a gradient is in the buffer, and send what is complete."""
        arrival.empty = False
        arrival.count += 1
        if arrival.count == arrival.expected:
            arrival.of.missing -= 1
            if not arrival.of.missing:
                self._send_ready(arrival.of.queue)

    def _send_ready(self, queue: list[_Progress]) -> None:
        """Send complete buckets, up to the first incomplete one."""
        for progress in queue:
            if progress.pending is None:
                if progress.missing:
                    return
                self._send([progress])

    def _send(self, ready: list[_Progress]) -> None:
        """Send buckets of one communicator, together."""
        for progress in ready:
            for arrival in progress.arrivals:
                if arrival.empty:
                    arrival.member.grad.zero_()
        pending = start_reduce_scatters(
            [progress.bucket.grads for progress in ready],
            ready[0].bucket.group,
            in_fp32=self.in_fp32,
            tags=[progress.tag for progress in ready],
        )
        for progress, under_way in zip(ready, pending, strict=True):
            progress.pending = under_way
            self.sent.append(progress.bucket)

    def _end(self) -> None:
        """Wait for communication under way, which other ranks take part in."""
        for progress in self._all:
            if progress.pending is not None:
                progress.pending.wait()
                progress.pending = None
