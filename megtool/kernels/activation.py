"""Activations of an MLP, plain and gated, with the bias before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import MappingError
from megtool.kernels import activation_triton, transformer_engine
from megtool.kernels.choice import Chosen, Kernel

KINDS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")
# Other names that Hugging Face has (ACT2FN) for the same formulas.
SAME = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}


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
    """The activation of `x + bias`, in x's dtype; `quick_gelu` is `x * sigmoid(1.702 x)`.

    Raises:
        MappingError: no activation is called `kind`.
    """
    kind = formula(kind)
    cannot: tuple[Chosen, ...] = () if kind in transformer_engine.KINDS else ("te",)
    return _ACTIVATE.on(x_TF.device, without=cannot)(x_TF, kind, bias)


def gated(
    x_T2F: Tensor,
    kind: str,
    *,
    bias: Tensor | None = None,
    limit: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """`activation(gate) * (up + offset)`, where `x + bias` is gate and up side by side.

    That is the order of Megatron's linear_fc1. A `limit` other than 0 clamps gate from above and
    up on both sides, before all else (gpt-oss: 7, with `quick_gelu` and offset 1).

    Raises:
        MappingError: no activation is called `kind`.
    """
    kind = formula(kind)
    plain = kind in transformer_engine.KINDS and not limit and not offset
    cannot: tuple[Chosen, ...] = () if plain else ("te",)
    return _GATED.on(x_T2F.device, without=cannot)(x_T2F, kind, bias, limit, offset)


def _activate(x_TF: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    x = x_TF if bias is None else x_TF + bias
    if kind == "silu":
        return F.silu(x)
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_pytorch_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.relu(x) if kind == "relu" else F.relu(x).square()


def _gated(x_T2F: Tensor, kind: str, bias: Tensor | None, limit: float, offset: float) -> Tensor:
    x = x_T2F if bias is None else x_T2F + bias
    gate, up = x.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if offset:
        up = up + offset
    out = _activate(gate, kind, None)
    # In place where no backward pass needs the factor: a large fresh tensor costs more than the
    # product on a CPU.
    return out * up if out.requires_grad or up.requires_grad else out.mul_(up)


_ACTIVATE = Kernel(
    "activation", _activate, triton=activation_triton.activate, te=transformer_engine.activate
)
_GATED = Kernel(
    "gated activation", _gated, triton=activation_triton.gated, te=transformer_engine.gated
)
