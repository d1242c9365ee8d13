"""A forward and its backward pass as two CUDA graphs with memory of their own.

Between the two other passes may run: pipeline stages have several micro batches under way. What the
forward pass saves for the backward pass stays in the memory of the graphs, so that a pair of graphs
serves one micro batch at a time. Callers look `GraphedPass` up in this module for each use, as they
do `CudaGraphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.kernels.graphs.cuda_graphs import abandon, clone, copy_into
from megtool.kernels.launch import for_graph

PassFunction = Callable[..., tuple[Tensor, ...]]
Inputs = Sequence[Tensor | None]


class GraphedPass:
    """`function` forward, and backward from its outputs, replayed for one micro batch at a time.

    The function takes tensors (or None) and returns tensors that need gradients. Gradients of those
    inputs that require them are returned by `backward`; those of parameters go into sums that stay
    where they are. It is captured when it is made, from `inputs` of the shapes of all later ones;
    `undo` is called after that, and puts back what the passes have added.

    Raises:
        GraphRuleError: the passes cannot be captured.
    """

    def __init__(
        self,
        function: PassFunction,
        inputs: Inputs,
        *,
        undo: Callable[[], None],
        pool: Any = None,
        warmups: int = 3,
    ) -> None:
        self.function = function
        self.inputs = [_static(x) for x in inputs]
        self.is_free = True
        try:
            self._capture(inputs, pool, warmups)
        finally:
            undo()

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The function's outputs, as copies without history."""
        self.is_free = False
        copy_into(self.inputs, inputs)
        return self._forward()

    def backward(self, grads: Inputs) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs of `forward`, as copies; None for those without."""
        gradients = self._backward(grads)
        self.is_free = True
        return gradients

    def _capture(self, inputs: Inputs, pool: Any, warmups: int) -> None:
        device = next(x.device for x in inputs if x is not None)
        with torch.cuda.device(device):
            side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream), for_graph():
                for _ in range(warmups):
                    copy_into(self.inputs, inputs)
                    outputs = self.function(*self.inputs)
                    run_backward(outputs, [torch.zeros_like(x) for x in outputs], self.inputs)
                    # The outputs keep the nodes that add gradients, which belong to this stream:
                    # a capture that met them again would wait for a stream outside of it.
                    del outputs
            torch.cuda.current_stream().wait_stream(side_stream)
            self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle() if pool is None else pool
            options: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
            try:
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(self._graphs[0], **options),
                ):
                    outputs = self.function(*self.inputs)
                self._grads = [torch.zeros_like(x) for x in outputs]
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(self._graphs[1], **options),
                ):
                    self._gradients = run_backward(outputs, self._grads, self.inputs)
            except RuntimeError as error:
                abandon(pool)
                raise GraphRuleError(
                    f"the passes cannot be captured: {str(error).strip().splitlines()[0]}",
                    hint="GraphRuleChecker of megtool's tests names the operation",
                ) from error
        self._outputs = tuple(x.detach() for x in outputs)

    def _forward(self) -> tuple[Tensor, ...]:
        self._graphs[0].replay()
        return tuple(x.clone() for x in self._outputs)

    def _backward(self, grads: Inputs) -> tuple[Tensor | None, ...]:
        copy_into(self._grads, grads)
        self._graphs[1].replay()
        return tuple(None if x is None else x.clone() for x in self._gradients)


def _static(x: Tensor | None) -> Tensor | None:
    """A copy of an input that stays where it is."""
    copy = clone(x)
    return copy if copy is None or x is None else copy.requires_grad_(x.requires_grad)


def run_backward(
    outputs: Sequence[Tensor], grads: Inputs, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """Add gradients to the sums of parameters; returns those of the inputs."""
    for x in inputs:
        if x is not None:
            x.grad = None
    torch.autograd.backward(outputs, grads)
    return tuple(None if x is None else x.grad for x in inputs)
