"""Accumulates weight gradients into an fp32 buffer in place, without a copy.

A bf16 weight's gradient is summed in fp32 over micro-batches and chunks. cuBLAS multiplies bf16 and
adds to fp32 in one call (`aten.addmm.dtype_out`), so that neither the product in bf16 (rounded once
too often) nor the factors in fp32 (twice the memory) ever exist; where that call is missing the
factors are cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.errors import UsageError


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


def accumulate_weight_gradient(main_grad_OI: Tensor, g_TO: Tensor, x_TI: Tensor) -> None:
    """Add a linear layer's weight gradient, `g_TO.T @ x_TI`, to `main_grad_OI` (fp32), in place.

    For training that accumulates gradients over micro-batches in `main_grad`, as Megatron does; a
    forward pass has no use for it. Leading dimensions of g and x are flattened into T. Raises as
    `accumulate_product`.
    """
    g_TO, x_TI = g_TO.flatten(0, -2), x_TI.flatten(0, -2)
    accumulate_product(main_grad_OI, g_TO.t(), x_TI)


def _adds_wide(main: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether the one-call sum of 16-bit products into fp32 is there for these tensors."""
    return (
        main.device.type == "cuda"
        and main.dtype == torch.float32
        and a.dtype == b.dtype
        and a.dtype in (torch.bfloat16, torch.float16)
        and hasattr(torch.ops.aten.addmm, "dtype_out")
    )
