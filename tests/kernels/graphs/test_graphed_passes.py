"""Pairs of graphs, forward and backward, that are under way at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.kernels.graphs.graphed_passes import GraphedPass
from tests.support.emulated.graph_rules import CheckedPass

ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


class Sums:
    """A weight whose gradients are added to a sum that stays where it is."""

    def __init__(self, device: str) -> None:
        self.weight = torch.randn(6, 5, device=device, requires_grad=True)
        self.total = torch.zeros(6, 5, device=device)
        self.weight.register_post_accumulate_grad_hook(self.take)

    def take(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.total.add_(weight.grad)
        weight.grad = None

    def undo(self) -> None:
        self.total.zero_()

    def run(self, x: Tensor | None, shift: Tensor | None) -> tuple[Tensor, ...]:
        assert x is not None
        y = torch.tanh(x @ self.weight.t())
        return (y if shift is None else y + shift,)

    def pair(self, x: Tensor) -> GraphedPass:
        kind = GraphedPass if x.is_cuda else CheckedPass
        return kind(self.run, [x, None], undo=self.undo)


@pytest.mark.parametrize("device", ON)
def test_passes_that_overlap_have_the_bits_of_passes_one_by_one(device: str) -> None:
    torch.manual_seed(0)
    sums = Sums(device)
    xs = [torch.randn(4, 5, device=device, requires_grad=True) for _ in range(4)]
    grads = [torch.randn(4, 6, device=device) for _ in range(4)]
    outs, gradients = [], []
    for x, g in zip(xs, grads, strict=True):
        (y,) = sums.run(x, None)
        y.backward(g)
        outs.append(y.detach())
        gradients.append(x.grad)
    want = sums.total.clone()
    sums.undo()
    pairs = [sums.pair(xs[0]) for _ in range(2)]
    assert not sums.total.any()
    for first in (0, 2):
        for i in (first, first + 1):  # both are under way
            (y,) = pairs[i - first].forward([xs[i], None])
            assert torch.equal(y, outs[i])
            assert not pairs[i - first].is_free
        for i in (first, first + 1):
            gradient, none = pairs[i - first].backward([grads[i]])
            assert none is None
            assert gradient is not None
            assert torch.equal(gradient, gradients[i])
            assert pairs[i - first].is_free
    assert torch.equal(sums.total, want)


def test_what_a_graph_would_not_repeat_is_named() -> None:
    sums = Sums("cpu")
    x = torch.randn(4, 5, requires_grad=True)
    factor = 2.0

    def run(x: Tensor | None, shift: Tensor | None) -> tuple[Tensor, ...]:
        assert x is not None
        return (x @ sums.weight.t() * factor,)

    pair = CheckedPass(run, [x, None], undo=sums.undo)
    pair.forward([x, None])
    pair.backward([torch.ones(4, 6)])
    factor = 3.0
    with pytest.raises(GraphRuleError, match="the same numbers"):
        pair.forward([x, None])

    def waits(x: Tensor | None, shift: Tensor | None) -> tuple[Tensor, ...]:
        assert x is not None
        return (x @ sums.weight.t() * x.sum().item(),)

    with pytest.raises(GraphRuleError, match="no waiting for the host"):
        CheckedPass(waits, [x, None], undo=sums.undo)

    def keeps(x: Tensor | None, shift: Tensor | None) -> tuple[Tensor, ...]:
        kept.append(torch.tanh(sums.weight).detach())
        return sums.run(x, shift)

    kept: list[Tensor] = []
    with pytest.raises(GraphRuleError, match="no memory of the graph kept outside"):
        CheckedPass(keeps, [x, None], undo=sums.undo)
