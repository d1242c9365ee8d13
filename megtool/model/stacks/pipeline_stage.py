"""Pipeline stages that free what they have sent, and schedules by the order of their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining import schedules as torch_schedules

from megtool.errors import MissingPackageError


class FreeingStage(PipelineStage):
    """A stage that keeps no output for the backward pass once it is sent.

    Only shapes of outputs are needed then, not values: Megatron's `deallocate_pipeline_outputs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsent: dict[int, tuple[Tensor, ...]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """torch's, but outputs are shapes once they are sent."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            outputs, inputs = self.fwd_cache[fwd_chunk_id]
            self._unsent[fwd_chunk_id] = tuple(out.detach() for out in outputs)
            shapes = tuple(_Shape.apply(out) for out in outputs)  # type: ignore[no-untyped-call]
            self.fwd_cache[fwd_chunk_id] = shapes, inputs
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """torch's, of the values, which are let go."""
        cached = self.fwd_cache[fwd_chunk_id]
        if fwd_chunk_id in self._unsent:
            self.fwd_cache[fwd_chunk_id] = self._unsent.pop(fwd_chunk_id), cached[1]
        try:
            return super().get_fwd_send_ops(fwd_chunk_id)
        finally:
            self.fwd_cache[fwd_chunk_id] = cached


class _Shape(torch.autograd.Function):
    """A tensor of the same shape with one element of memory, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def make_schedule(
    stages: Sequence[PipelineStage],
    num_microbatches: int,
    loss: Callable[..., Tensor],
    *,
    overlap_p2p: bool | None = None,
) -> Any:
    """torch's 1F1B of one stage, or interleaved 1F1B of several virtual ones.

    With `overlap_p2p` messages are received ahead and sent behind, while a stage computes;
    otherwise a stage waits for those of both directions together. None is torch's own choice, and
    Megatron's default: interleaved stages overlap them, and others do not.

    Raises:
        MissingPackageError: this version of torch cannot do it.
    """
    is_single = len(stages) == 1
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if overlap_p2p is None or overlap_p2p is not is_single:
        if is_single:
            return Schedule1F1B(stages[0], num_microbatches, **options)
        return ScheduleInterleaved1F1B(list(stages), num_microbatches, **options)
    schedule: Any
    try:
        runtime: Any = torch_schedules._PipelineScheduleRuntime
        by_step = torch_schedules.PipelineScheduleMulti._step_microbatches
        if is_single:
            schedule = runtime(list(stages), num_microbatches, **options)
            texts = order_1f1b(stages[0].num_stages, num_microbatches)
            make: Any = torch_schedules._Action.from_str
            schedule._prepare_schedule_with_comms(
                {rank: [make(text) for text in of_rank] for rank, of_rank in texts.items()}
            )
        else:
            schedule = ScheduleInterleaved1F1B(list(stages), num_microbatches, **options)
            schedule._step_microbatches = MethodType(by_step, schedule)
    except AttributeError as e:
        raise MissingPackageError(
            f"torch {torch.__version__} has one order of messages between pipeline stages: {e}",
            hint="pip install 'torch>=2.9', or leave out --overlap-p2p-communication",
        ) from e
    return schedule


def order_1f1b(num_stages: int, num_microbatches: int) -> dict[int, list[str]]:
    """The passes of every stage of 1F1B, in torch's notation: stage, F or B, micro batch.

    A stage begins with as many forward passes as there are stages from it to the last one.
    """
    out: dict[int, list[str]] = {}
    for stage in range(num_stages):
        num_ahead = min(num_microbatches, num_stages - stage)
        passes = [f"{stage}F{n}" for n in range(num_ahead)]
        for n in range(num_microbatches):
            passes.append(f"{stage}B{n}")
            if n + num_ahead < num_microbatches:
                passes.append(f"{stage}F{n + num_ahead}")
        out[stage] = passes
    return out
