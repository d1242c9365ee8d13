"""Accumulates weight gradients into a buffer in place, without a copy.

A bf16 weight's gradient is summed in fp32 over micro-batches and chunks. cuBLAS multiplies bf16 and
adds to fp32 in one call (`aten.addmm.dtype_out`), so that neither the product in bf16 (rounded once
too often) nor the factors in fp32 (twice the memory) ever exist; where that call is missing the
factors are cast.

A weight whose optimizer wants it (`--gradient-accumulation-fusion`) has a `GradientSum`. The layers
that find one add the product themselves, and autograd gets no gradient of the weight. Off CUDA the
product is made and added in tiles of rows: the bits are those of a product that is added as a
whole, and no tensor as large as the weight is needed. A weight that is used several times in a
pass (the output layer of multi-token prediction) gets one sum after the other, where autograd would
add them to each other first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from megtool.errors import UsageError

TILE_ELEMENTS = 1 << 20
"""Elements of a tile of a product, in whole rows."""


class GradientSum(Protocol):
    """The sum of a weight's gradients, over micro-batches."""

    def begin(self) -> tuple[Tensor, bool]:
        """The sum, of the weight's shape, and whether it is to be overwritten: it has no gradient.

        Raises:
            UsageError: the sum of this step is complete.
        """

    def end(self) -> None:
        """A gradient was added."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a copy of the parameter in another process has no sum."""
        return type(None), ()


def gradient_sum(weight: Tensor) -> GradientSum | None:
    """Where a layer's backward pass adds the weight's gradient; None if autograd is to have it.

    It has that of a weight with hooks (`Tensor.register_hook`), which want to see the gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    return stored_sum(weight)


def stored_sum(weight: Tensor) -> GradientSum | None:
    """The same for a weight that is known to want a gradient, in `autograd.Function.forward`."""
    if weight._backward_hooks:
        return None
    return cast("GradientSum | None", getattr(weight, "gradient_sum", None))


def set_gradient_sum(parameter: nn.Parameter, total: GradientSum) -> None:
    """Have layers add the parameter's gradient to `total`.

    Off CUDA embeddings are left out: where they are the output layer, too, autograd adds the two
    gradients of a micro-batch to each other first, and the sum has other bits.
    """
    if not parameter.is_cuda and getattr(parameter, "is_embedding_parameter", False):
        return
    parameter.gradient_sum = total  # type: ignore[attr-defined]


def set_gradient_sums(
    owner: object, given: Sequence[tuple[nn.Parameter, GradientSum]]
) -> weakref.finalize[[Sequence[tuple[nn.Parameter, GradientSum]]], object]:
    """Have layers add gradients to these sums until the owner is gone, or the result is called."""
    for parameter, total in given:
        set_gradient_sum(parameter, total)
    return weakref.finalize(owner, remove_gradient_sums, given)


def remove_gradient_sums(given: Sequence[tuple[nn.Parameter, GradientSum]]) -> None:
    """Let autograd have the gradients again, unless another sum was set since."""
    for parameter, total in given:
        if getattr(parameter, "gradient_sum", None) is total:
            del parameter.gradient_sum  # type: ignore[attr-defined]


def put_product(main_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, overwrite: bool) -> None:
    """`main = a @ b` or `main += a @ b`, in place; a and b have one dtype."""
    if overwrite and main_MN.dtype == a_MK.dtype:
        torch.mm(a_MK, b_KN, out=main_MN)
    elif _adds_wide(main_MN, a_MK, b_KN):
        beta = 0 if overwrite else 1
        torch.ops.aten.addmm.dtype_out(main_MN, a_MK, b_KN, torch.float32, beta=beta, out=main_MN)
    elif main_MN.is_cuda and main_MN.dtype == a_MK.dtype:
        main_MN.addmm_(a_MK, b_KN)
    else:
        rows = max(1, TILE_ELEMENTS // max(1, main_MN.shape[1]))
        for start in range(0, main_MN.shape[0], rows):
            tile = slice(start, start + rows)
            put = main_MN[tile].copy_ if overwrite else main_MN[tile].add_
            put(torch.mm(a_MK[tile], b_KN))


def add_weight_gradient(total: GradientSum, g_TO: Tensor, x_TI: Tensor) -> None:
    """Add a linear layer's weight gradient, `g_TO.T @ x_TI`; leading dimensions are flattened."""
    main_OI, overwrite = total.begin()
    put_product(main_OI, g_TO.flatten(0, -2).t(), x_TI.flatten(0, -2), overwrite=overwrite)
    total.end()


def accumulate_product(main_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """`main += a @ b` in main's dtype (fp32 or fp64), in place; nothing is recorded by autograd.

    The products of bf16 or fp16 factors are exact in fp32, so only the order of summation differs
    between the paths.

    Raises UsageError where main is not at least fp32 or not at least as wide as the factors.
    """
    if main_MN.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"gradients are summed in fp32 or fp64, not in {main_MN.dtype}",
            hint="give a float32 buffer",
        )
    if torch.promote_types(a_MK.dtype, b_KN.dtype).itemsize > main_MN.dtype.itemsize:
        raise UsageError(f"{a_MK.dtype} x {b_KN.dtype} would be rounded to {main_MN.dtype}")
    with torch.no_grad():
        if a_MK.dtype == b_KN.dtype == main_MN.dtype:
            main_MN.addmm_(a_MK, b_KN)
        elif _adds_wide(main_MN, a_MK, b_KN):
            torch.ops.aten.addmm.dtype_out(main_MN, a_MK, b_KN, torch.float32, out=main_MN)
        else:
            main_MN.addmm_(a_MK.to(main_MN.dtype), b_KN.to(main_MN.dtype))


def _adds_wide(main: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether the one-call sum of 16-bit products into fp32 is there for these tensors."""
    return (
        main.device.type == "cuda"
        and main.dtype == torch.float32
        and a.dtype == b.dtype
        and a.dtype in (torch.bfloat16, torch.float16)
        and hasattr(torch.ops.aten.addmm, "dtype_out")
    )
