"""Weights that Transformer Engine's modules use without a copy, and their gradients.

Its modules have parameters of their own; ours stay where they are, and for each call a module is
lent tensors of the same storage. Where a weight has a `GradientSum`
(`kernels.wgrad_accumulation`) the product adds its gradient there, in fp32, by what Transformer
Engine calls `fuse_wgrad_accumulation`: it adds to `main_grad` of the tensor that it was lent.

Held against the sources of Transformer Engine 2.20 (`pytorch/module/base.py`,
`grouped_linear.py`, `linear.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.wgrad_accumulation import GradientSum, gradient_sum


def call(module: Any, weights: Mapping[tuple[str, ...], Tensor], *args: Any) -> Tensor:
    """A module's output, whose backward pass adds gradients of weights where they belong.

    `weights` are by the module's names for them; a stacked one, `[E, O, I]`, has a name for each of
    its first dimension. The module has them for this call alone: parameters may move in memory.
    """
    sums = [gradient_sum(weight) for weight in weights.values()]
    trained = [total for w, total in zip(weights.values(), sums, strict=True) if w.requires_grad]
    has_sums = bool(trained) and None not in trained  # a module has one way for all its weights
    lent = [
        _LentWeight(weight, total if has_sums else None)
        for weight, total in zip(weights.values(), sums, strict=True)
    ]
    module.fuse_wgrad_accumulation = has_sums
    for names, lent_weight in zip(weights, lent, strict=True):
        for name, tensor in zip(names, lent_weight.tensors, strict=True):
            module._parameters.pop(name, None)
            setattr(module, name, tensor)
    out: Tensor = module(*args)
    for names in weights:
        for name in names:
            setattr(module, name, None)
    return _Begin.apply(out, lent) if has_sums else out  # type: ignore[no-untyped-call]


class _LentWeight:
    """A weight for one call: the tensors of its storage, and the sum of its gradients."""

    def __init__(self, weight: Tensor, total: GradientSum | None) -> None:
        self.total = total
        self.tensors: tuple[Tensor, ...] = _Lend.apply(weight, total)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Say where the gradient is added, before the module's backward pass."""
        if self.total is None:
            return
        main, overwrite = self.total.begin()
        if overwrite:
            main.zero_()
        for tensor, part in zip(self.tensors, _parts(main), strict=True):
            tensor.main_grad = part  # type: ignore[attr-defined]


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    return x.unbind(0) if x.dim() == 3 else (x,)


class _Lend(torch.autograd.Function):
    """The tensors of a weight; their gradients come back as one, or are in its sum already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: GradientSum | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.shape = total, weight.shape
        return _parts(weight.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        if ctx.total is not None:
            ctx.total.end()
            return None, None
        given = [grad for grad in grads if grad is not None]
        if not given or len(ctx.shape) == 2:
            return (given[0] if given else None), None
        whole = given[0]._base
        if whole is not None and whole.shape == ctx.shape:
            return whole, None  # Transformer Engine's are parts of one tensor
        return torch.stack(given), None


class _Begin(torch.autograd.Function):
    """The identity, whose backward pass comes before that of the module."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lent: Sequence[_LentWeight]) -> Tensor:
        ctx.lent = lent
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for weight in ctx.lent:
            weight.begin()
        return grad, None
