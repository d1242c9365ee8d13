"""Offloaded segments, and the streams that copy gradients and parameters during their update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megtool.optim.fp8.weights import find_fp8_weight
from megtool.optim.segments import Segment, Span

ALIGNED = 64  # elements: whole vectors, and whole lines of the cache, of any CPU


@dataclass(slots=True, kw_only=True, eq=False)
class OffloadedSegment(Segment):
    """A segment that is on the host up to some element, and on the device from there on.

    For norms and reductions it stays one segment with one gradient, so that sums do not depend on
    the split. Its two parts have everything else.
    """

    host_part: Segment
    device_part: Segment | None
    grad_device: torch.device

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.host_part.numel + (0 if self.device_part is None else self.device_part.numel)

    @property
    def device(self) -> torch.device:
        """The device of the gradient."""
        return self.grad_device

    def main_parts(self) -> list[tuple[int, Tensor]]:
        parts = self.host_part.main_parts()
        if self.device_part is not None:
            shift = self.host_part.numel
            parts += [(shift + start, main) for start, main in self.device_part.main_parts()]
        return parts


def slice_segment(segment: Segment, start: int, stop: int) -> Segment:
    """A part of a segment, with the same storage, and with the spans inside it."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[start:stop]

    spans = []
    for span in segment.spans:
        low, high = max(span.offset, start), min(span.end, stop)
        if low < high:
            first = span.start + low - span.offset
            spans.append(
                Span(
                    param_info=span.param_info,
                    start=first,
                    stop=first + high - low,
                    offset=low - start,
                )
            )
    return Segment(
        group=segment.group,
        spans=tuple(spans),
        main=part(segment.main),
        high=part(segment.high),
        low=part(segment.low),
        grad=part(segment.grad),
        replicated=segment.replicated,
        states={name: tensor[start:stop] for name, tensor in segment.states.items()},
    )


@dataclass(slots=True, kw_only=True)
class _StagingBuffer:
    """One of two buffers each way, and (on CUDA) events that tell when each has been read."""

    grad: Tensor
    out: dict[torch.dtype, Tensor] = field(default_factory=dict)
    has_grad: torch.cuda.Event | None = None
    is_out: torch.cuda.Event | None = None

    def staged(self, values: Tensor) -> Tensor:
        """Values in a pinned buffer, which must not be written until `is_out`."""
        if values.dtype not in self.out:
            numel = self.grad.numel()
            self.out[values.dtype] = torch.empty(numel, dtype=values.dtype, pin_memory=True)
        return self.out[values.dtype][: values.numel()].copy_(values)


class OffloadStreams:
    """Copies gradients to the host, updates there, and copies parameters back, all at a time.

    If the device is the CPU, these steps run one after the other.
    """

    def __init__(self, segments: list[OffloadedSegment], numel: int) -> None:
        largest = max((s.host_part.numel for s in segments), default=0)
        num_blocks = -(-largest // ALIGNED)
        self.numel = ALIGNED * max(1, min(numel // ALIGNED, num_blocks))
        self._lanes: list[_StagingBuffer] = []
        self._is_cuda = False
        self._down: torch.cuda.Stream | None = None
        self._up: torch.cuda.Stream | None = None

    def open(self, segments: list[OffloadedSegment]) -> None:
        """Let copies wait for the work queued on the device so far, which reduces gradients."""
        device = segments[0].grad_device if segments else torch.device("cpu")
        if device.type != "cuda":
            return
        if self._down is None:
            self._is_cuda = True
            self._down, self._up = (
                torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))

    def run(self, segments: list[OffloadedSegment], update: Callable[[Segment], None]) -> None:
        """Update all segments, and write their parameters."""
        work = [(s, *ends) for s in segments for ends in _chunks(s.host_part, self.numel)]
        if not work:
            return
        if not self._lanes:
            self._lanes = [
                _StagingBuffer(grad=torch.empty(self.numel, pin_memory=self._is_cuda))
                for _ in range(2)
            ]
        self._fetch(self._lanes[0], *work[0])
        for i, (segment, start, stop) in enumerate(work):
            lane = self._lanes[i % 2]
            if i + 1 < len(work):
                self._fetch(self._lanes[(i + 1) % 2], *work[i + 1])
            if lane.has_grad is not None:
                lane.has_grad.synchronize()
            part = slice_segment(segment.host_part, start, stop)
            part.grad = lane.grad[: stop - start]
            update(part)
            self._send(lane, part)
        if self._up is not None:
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)

    def _fetch(
        self, lane: _StagingBuffer, segment: OffloadedSegment, start: int, stop: int
    ) -> None:
        if segment.grad is None:
            raise RuntimeError("an update before gradients were reduced")
        with _on(self._down):
            lane.grad[: stop - start].copy_(segment.grad[start:stop], non_blocking=True)
            if self._down is not None:
                lane.has_grad = self._down.record_event()

    def _send(self, lane: _StagingBuffer, part: Segment) -> None:
        values = stored_values(part)
        if self._up is None:
            write_parameters(part, values)
            return
        if lane.is_out is not None:
            lane.is_out.synchronize()
        with _on(self._up):
            write_parameters(part, lane.staged(values))
            lane.is_out = self._up.record_event()


def _chunks(segment: Segment, numel: int) -> Iterator[tuple[int, int]]:
    """A segment's elements in chunks of `numel`."""
    for start in range(0, segment.numel, numel):
        yield start, min(start + numel, segment.numel)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def stored_values(part: Segment) -> Tensor:
    """The parameters' new values of a part of a segment, in their dtype (the same for all)."""
    if part.main is None:
        return part.halves[0]
    return part.main.to(part.spans[0].param_info.parameter.dtype) if part.spans else part.main


def write_parameters(part: Segment, values: Tensor) -> None:
    """Copy values of a part of a segment into its parameters, unless they share memory, or are FP8
    alone."""
    for span in part.spans:
        if find_fp8_weight(span.param_info.parameter) is not None:
            continue  # cast from the main parameter when it is gathered
        place = span.param_info.parameter.detach().view(-1)[span.start : span.stop]
        new = values[span.offset : span.end]
        if place.data_ptr() != new.data_ptr():
            place.copy_(new, non_blocking=True)
