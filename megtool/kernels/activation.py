"""Activations of an MLP, plain and gated, with the bias before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import MappingError

# Hugging Face's names (ACT2FN) of the formulas known here.
SAME = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
KINDS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


def formula(kind: str) -> str:
    """The one of KINDS that Hugging Face's name `kind` stands for.

    Raises:
        MappingError: none does.
    """
    name = SAME.get(kind, kind)
    if name not in KINDS:
        raise MappingError(
            f"no activation is called {kind!r}", hint=f"known: {', '.join((*KINDS, *SAME))}"
        )
    return name


def activate(x_TF: Tensor, kind: str, *, bias: Tensor | None = None) -> Tensor:
    """The activation of `x + bias`."""
    x = x_TF if bias is None else x_TF + bias
    return _activate(x, formula(kind))


def gated(
    x_T2F: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    limit: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """`activation(gate) * (up + offset)`, where `x + bias` is gate and up side by side."""
    x = x_T2F if bias is None else x_T2F + bias
    gate, up = x.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _activate(gate, formula(kind)) * (up + offset if offset else up)


def _activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_pytorch_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.relu(x) if kind == "relu" else F.relu(x).square()
