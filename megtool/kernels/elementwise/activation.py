"""Activations of an MLP, plain and gated, with the bias before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.errors import MappingError
from megtool.kernels.dispatch import Chosen, Kernel
from megtool.kernels.elementwise import activation_triton, liger
from megtool.kernels.transformer_engine import library as transformer_engine

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
    """The entry of KINDS for Hugging Face's name `kind`.

    Raises:
        MappingError: none does.
    """
    name = SAME.get(kind, kind)
    if name not in KINDS:
        raise MappingError(
            f"the activation {kind!r} is unknown", hint=f"known: {', '.join((*KINDS, *SAME))}"
        )
    return name


def activate(x_TF: Tensor, kind: str, *, bias: Tensor | None = None) -> Tensor:
    """The activation of `x + bias`, in x's dtype; `quick_gelu` is `x * sigmoid(1.702 x)`.

    `bias` is for products that cannot add it; `megtool.model`'s projections add theirs at no cost
    in the product (cuBLAS's epilogue).

    Raises:
        MappingError: unknown activation `kind`.
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
        MappingError: unknown activation `kind`.
    """
    kind = formula(kind)
    plain = kind in transformer_engine.KINDS and not limit and not offset
    cannot = liger.cannot_gate(kind, limit=limit, offset=offset)
    if not plain:
        cannot = ("te", *cannot)
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
    if x.requires_grad and kind in _BACKWARD and not limit and not offset:
        return cast(Tensor, _GatedProduct.apply(x, kind))  # type: ignore[no-untyped-call]
    gate, up = x.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if offset:
        up = up + offset
    out = _activate(gate, kind, None)
    # In place where no backward pass needs the factor: a large fresh tensor costs more than the
    # product on a CPU.
    return out * up if out.requires_grad or up.requires_grad else out.mul_(up)


def _silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)


def _gelu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=out)


def _tanh_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out)


_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "silu": _silu_backward,
    "gelu": _gelu_backward,
    "gelu_pytorch_tanh": _tanh_backward,
}
"""The activation's gradient written where it is wanted."""


class _GatedProduct(torch.autograd.Function):
    """A gated activation whose backward fills one buffer: autograd would join two halves."""

    @staticmethod
    def forward(ctx: Any, x_T2F: Tensor, kind: str) -> Tensor:
        gate, up = x_T2F.chunk(2, -1)
        active = _activate(gate, kind, None)
        ctx.save_for_backward(x_T2F, active)
        ctx.kind = kind
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        x_T2F, active = ctx.saved_tensors
        gate, up = x_T2F.chunk(2, -1)
        out = torch.empty_like(x_T2F)
        for_gate, for_up = out.chunk(2, -1)
        torch.mul(grad_TF, active, out=for_up)
        _BACKWARD[ctx.kind](grad_TF * up, gate, for_gate)
        return out, None


_ACTIVATE = Kernel(
    "activation", _activate, triton=activation_triton.activate, te=transformer_engine.activate
)
_GATED = Kernel(
    "gated activation",
    _gated,
    triton=activation_triton.gated,
    te=transformer_engine.gated,
    packages={"liger": liger.gated},  # not preferred: it copies gate and up apart
)
