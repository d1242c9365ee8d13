"""A forward and its backward pass as two CUDA graphs with memory of their own.

Between the two other passes may run: pipeline stages have several micro batches under way. What the
forward pass saves for the backward pass stays in the memory of the graphs, so that a pair of graphs
serves one micro batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.kernels.graphs.cuda_graphs import abandon, clone, copy_into, is_checking_graph_rules
from megtool.kernels.graphs.rule_checker import HostRules, Trace, Watch

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
            with torch.cuda.stream(side_stream):
                for _ in range(warmups):
                    copy_into(self.inputs, inputs)
                    outputs = self.function(*self.inputs)
                    _run_backward(outputs, [torch.zeros_like(x) for x in outputs], self.inputs)
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
                    self._gradients = _run_backward(outputs, self._grads, self.inputs)
            except RuntimeError as error:
                abandon(pool)
                raise GraphRuleError(
                    f"the passes cannot be captured: {str(error).strip().splitlines()[0]}",
                    hint="megtool.kernels.graphs.rule_checker names the operation",
                ) from error
        self._outputs = tuple(x.detach() for x in outputs)

    def _forward(self) -> tuple[Tensor, ...]:
        self._graphs[0].replay()
        return tuple(x.clone() for x in self._outputs)

    def _backward(self, grads: Inputs) -> tuple[Tensor | None, ...]:
        copy_into(self._grads, grads)
        self._graphs[1].replay()
        return tuple(None if x is None else x.clone() for x in self._gradients)


class CheckedPass(GraphedPass):
    """The same on any device, which checks the rules of graphs: both passes have to do what they
    did when they were captured, on the same tensors from outside.

    Raises (by `forward` and `backward`):
        GraphRuleError: a captured graph would go wrong; it names the operation.
    """

    def _capture(self, inputs: Inputs, pool: Any, warmups: int) -> None:
        self._trace: Trace | None = None
        outputs = self.function(*self.inputs)  # the warm-up may build tables
        _run_backward(outputs, [torch.zeros_like(x) for x in outputs], self.inputs)
        copy_into(self.inputs, inputs)
        del outputs
        copies = self._forward()
        self._backward([torch.zeros_like(x) for x in copies])
        self._trace = self._watch.trace

    def _forward(self) -> tuple[Tensor, ...]:
        self._watch = Watch(self.inputs, self._trace)
        self._outputs = self._watched(lambda: self.function(*self.inputs))
        return tuple(x.detach().clone() for x in self._outputs)

    def _backward(self, grads: Inputs) -> tuple[Tensor | None, ...]:
        static = [None if g is None else g.clone() for g in grads]
        # Filled before the replay, as the inputs are.
        self._watch.add_inputs(static, first=len(self.inputs))
        gradients = self._watched(lambda: _run_backward(self._outputs, static, self.inputs))
        copies = tuple(None if g is None else g.clone() for g in gradients)
        self._outputs = ()
        del gradients
        for x in self.inputs:
            if x is not None:
                x.grad = None
        self._watch.finish()
        self._watch.release()
        return copies

    def _watched(self, run: Callable[[], Any]) -> Any:
        token = is_checking_graph_rules.set(True)
        try:
            with torch.enable_grad(), HostRules(), self._watch:
                return run()
        finally:
            is_checking_graph_rules.reset(token)


def graphed_pass(
    function: PassFunction,
    inputs: Inputs,
    device: torch.device,
    *,
    undo: Callable[[], None],
    pool: Any = None,
) -> GraphedPass:
    """A `GraphedPass` on a CUDA device, a `CheckedPass` elsewhere, which is for tests."""
    kind = GraphedPass if device.type == "cuda" else CheckedPass
    return kind(function, inputs, undo=undo, pool=pool)


def _static(x: Tensor | None) -> Tensor | None:
    """A copy of an input that stays where it is."""
    copy = clone(x)
    return copy if copy is None or x is None else copy.requires_grad_(x.requires_grad)


def _run_backward(
    outputs: Sequence[Tensor], grads: Inputs, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """Add gradients to the sums of parameters; returns those of the inputs."""
    for x in inputs:
        if x is not None:
            x.grad = None
    torch.autograd.backward(outputs, grads)
    return tuple(None if x is None else x.grad for x in inputs)
