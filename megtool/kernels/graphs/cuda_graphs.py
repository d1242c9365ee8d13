"""CUDA graphs of a function, one per input shape, sharing one pool of memory.

A captured graph repeats device work on fixed addresses: the same kernels with the same numbers on
the same storages. The function takes tensors (or None) and returns tensors in any nest of tuples,
lists and dicts. Callers look `CudaGraphs` up in this module for each use: on a CPU, tests put a
checker of those rules in its place, for which a tensor is not `is_cpu`.

What a caller has to know: a function runs `warmups` times before it is captured, so that writes to
a cache have to be repeatable; name what is not (a counter that advances) in `state`, which is put
back after the warm-up, also where the capture fails. Gradients have to have their buffers before
(`grad` is not None), and to be zeroed by the function, named in `state`, or zeroed by `undo`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megtool.errors import GraphRuleError, MissingPackageError, UsageError
from megtool.kernels.dispatch import chosen
from megtool.kernels.launch import for_graph

Function = Callable[..., Any]
Input = Tensor | None


@dataclass(slots=True, kw_only=True)
class Captured:
    """One captured graph and the storages it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Input]
    outputs: Any


class CudaGraphs:
    """Calls `function` by replaying a CUDA graph captured at the first call with such inputs.

    Inputs are copied into storages of the graph, outputs out of it: they are the caller's, and
    carry no autograd history. With `copies=False` the outputs are the graph's own and hold until
    the next call: graphs of other shapes work in the same memory. `pool` joins the memory of
    several `CudaGraphs` that never run at the same time. A graph is chosen by shapes, strides
    aside, dtypes, grad mode and the kernels in use. `undo` is called after the warm-up, also where
    the capture fails, and puts back what is too large for a copy (`state` is copied).

    Raises MissingPackageError where there is no CUDA device, UsageError for inputs elsewhere,
    GraphRuleError where the function cannot be captured.
    """

    def __init__(
        self,
        function: Function,
        *,
        pool: Any = None,
        warmups: int = 3,
        state: Sequence[Tensor] = (),
        undo: Callable[[], None] | None = None,
        copies: bool = True,
    ) -> None:
        self.function = function
        self.warmups = warmups
        self.state = tuple(state)
        self.undo = undo
        self.copies = copies
        self.captured: dict[tuple[Any, ...], Any] = {}
        self.pool = self._make_pool() if pool is None else pool

    def __call__(self, *inputs: Input) -> Any:
        """The function's outputs for `inputs`."""
        for x in inputs:
            if x is not None and not isinstance(x, Tensor):
                raise UsageError(
                    f"a graph takes tensors, not {x!r}", hint="put the number into a tensor"
                )
        key = key_of(inputs)
        if key not in self.captured:
            self.captured[key] = self._capture(inputs)
        return self._replay(self.captured[key], inputs)

    @staticmethod
    def can_capture(device: torch.device) -> bool:
        """Return whether work on the device can be captured."""
        return device.type == "cuda"

    def _make_pool(self) -> Any:
        """A memory pool that all graphs of this object allocate from."""
        if not torch.cuda.is_available():
            raise MissingPackageError(
                "CUDA graphs need a CUDA device, and there is none",
                hint="run the function itself, without graphs",
                error_id="missing-device",
            )
        return torch.cuda.graph_pool_handle()

    def _capture(self, inputs: Sequence[Input]) -> Any:
        """Record the function on the device that its inputs are on."""
        for x in inputs:
            if x is not None and not x.is_cuda:
                raise UsageError(f"a CUDA graph cannot take a tensor on {x.device}")
        # Streams are the current device's: on another one nothing would be recorded.
        device = next((x.device for x in inputs if x is not None), torch.cuda.current_device())
        with torch.cuda.device(device):
            return self._record(inputs)

    def _record(self, inputs: Sequence[Input]) -> Captured:
        """Warm the function up on a side stream, then record it."""
        static = [clone(x) for x in inputs]
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            before = [t.clone() for t in self.state]
            with for_graph():
                for _ in range(self.warmups):
                    copy_into(static, inputs)
                    self.function(*static)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (data loading, collectives) may allocate while this one records. The outer
        # stream is there for a capture that breaks: torch then stays on the one it recorded on.
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                outputs = map_tensors(torch.Tensor.detach, self.function(*static))
        except RuntimeError as error:  # what ran in the warm-up cannot be recorded
            abandon(self.pool)
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise GraphRuleError(
                f"the function cannot be captured: {str(first).strip().splitlines()[0]}",
                hint="GraphRuleChecker of megtool's tests names the operation",
            ) from error
        finally:
            self._put_back(before)
        return Captured(graph=graph, inputs=static, outputs=outputs)

    def _put_back(self, before: Sequence[Tensor]) -> None:
        """Undo what a run of the function has written."""
        copy_into(self.state, before)
        if self.undo is not None:
            self.undo()

    def _replay(self, captured: Any, inputs: Sequence[Input]) -> Any:
        """Copy the inputs in, repeat the recorded work, copy the outputs out."""
        copy_into(captured.inputs, inputs)
        captured.graph.replay()
        return map_tensors(torch.clone, captured.outputs) if self.copies else captured.outputs


def abandon(pool: Any) -> None:
    """Release what a failed capture still holds; safe if it holds nothing.

    torch (2.10, 2.11) stops at the error that ends the recording: its allocator goes on to take
    the pool for that capture, and random numbers stay those of a capture, until one ends well.
    """
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # "not currently recording": it has ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with (
        contextlib.suppress(RuntimeError),
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        torch.zeros(1, device="cuda")


def _first(error: BaseException) -> BaseException:
    """The original error of a failed capture."""
    while error.__context__ is not None and isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def key_of(inputs: Sequence[Input]) -> tuple[Any, ...]:
    """The key that decides whether a captured graph fits these inputs."""
    shapes = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in inputs)
    kernels = tuple(chosen(x.device) for x in inputs[:1] if x is not None)
    return shapes, kernels, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def clone(x: Input) -> Input:
    """A contiguous copy without history."""
    return None if x is None else x.detach().clone(memory_format=torch.contiguous_format)


def copy_into(targets: Sequence[Input], sources: Sequence[Input]) -> None:
    """Copy tensors one by one into persistent storages."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if target is not None and source is not None:
                target.copy_(source)


def map_tensors(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """The nest of tuples, lists and dicts with every tensor changed; None stays.

    Raises UsageError for anything else: a number would be the recorded one for ever.
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return {name: map_tensors(change, value) for name, value in nest.items()}
    if isinstance(nest, tuple | list):
        parts = [map_tensors(change, value) for value in nest]
        if hasattr(nest, "_fields"):
            return type(nest)(*parts)
        return type(nest)(parts)
    if nest is None:
        return None
    raise UsageError(f"a graph returns tensors, not {nest!r}", hint="return it in a tensor")
