"""The end of a residual branch: bias, dropout, scale and addition to the residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels import dropout_add_triton
from megtool.kernels.choice import Kernel


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    training: bool,
    scale: float = 1.0,
) -> Tensor:
    """`residual + scale * dropout(x + bias)`, in the wider one of the dtypes of x and residual.

    Dropout zeroes an element with probability `p` and divides the others by `1 - p`, while
    `training`. Which ones follows torch.manual_seed, but not alike in all implementations.

    For models that are trained with dropout; `megtool.model` has none, so its layers add plainly.
    """
    run = _BIAS_DROPOUT_ADD.on(x.device)
    return run(x, bias, residual, p if training else 0.0, scale)


def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, scale: float
) -> Tensor:
    if bias is not None:
        x = x + bias
    if p:
        x = F.dropout(x, p, True)
    return torch.add(residual, x, alpha=scale)


_BIAS_DROPOUT_ADD = Kernel(
    "bias_dropout_add", _bias_dropout_add, triton=dropout_add_triton.bias_dropout_add
)
