"""RMSNorm and LayerNorm, also fused with the residual addition before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.dispatch import Chosen, Kernel
from megtool.kernels.elementwise import liger, norm_triton
from megtool.kernels.launch import LONGEST_ROW
from megtool.kernels.transformer_engine import library as transformer_engine

P = ParamSpec("P")


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, computed in fp32, in x's dtype.

    `zero_centered` weights (Gemma's, and Megatron's `layernorm_zero_centered_gamma`) are stored
    less 1. Without `weight` it is an L2 norm as Llama 4 and Megatron name it.

    Where x has 16 bits the result is rounded once, after the weight; Hugging Face's Llama rounds
    before it too.
    """
    cannot = (*_too_long(x), *liger.cannot(x, weight))
    if weight is None:
        cannot = ("te", *cannot)
    return _RMS_NORM.on(x.device, without=cannot)(x, weight, eps, zero_centered)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dim, as `rms_norm`."""
    cannot = (*_too_long(x), *liger.cannot(x, bias, zero_centered=zero_centered))
    run = _LAYER_NORM.on(x.device, without=cannot)
    return run(x, weight, bias, eps, zero_centered)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` in x's dtype, and that sum in the wider one of their dtypes."""
    same = residual if residual.dtype == x.dtype and residual.shape == x.shape else None
    run = _ADD_RMS_NORM.on(x.device, without=(*_too_long(x), *liger.cannot(x, same)))
    return run(x, residual, weight, eps, zero_centered)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same with a layer norm."""
    run = _ADD_LAYER_NORM.on(x.device, without=_too_long(x))
    return run(x, residual, weight, bias, eps, zero_centered)


def _too_long(x: Tensor) -> tuple[Chosen, ...]:
    return ("triton",) if x.shape[-1] > LONGEST_ROW else ()


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    if weight is None or (weight.dtype == x.dtype and not zero_centered):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    kind = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(kind) + 1 if zero_centered else weight.to(kind)
    return F.rms_norm(x.to(kind), x.shape[-1:], scale, eps).to(x.dtype)


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    if weight.dtype == x.dtype and not zero_centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    kind = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(kind) + 1 if zero_centered else weight.to(kind)
    shift = None if bias is None else bias.to(kind)
    return F.layer_norm(x.to(kind), x.shape[-1:], scale, shift, eps).to(x.dtype)


def _of_sum(
    norm: Callable[Concatenate[Tensor, P], Tensor],
) -> Callable[Concatenate[Tensor, Tensor, P], tuple[Tensor, Tensor]]:
    """A norm with a residual: torch adds, and the sum is returned too."""

    def run(
        x: Tensor, residual: Tensor, /, *args: P.args, **more: P.kwargs
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *args, **more).to(x.dtype), total

    return run


_RMS_NORM = Kernel(
    "rms_norm",
    _rms_norm,
    triton=norm_triton.rms_norm,
    te=transformer_engine.rms_norm,
    packages={"liger": liger.rms_norm},
    preferred=("liger",),
)
_LAYER_NORM = Kernel(
    "layer_norm",
    _layer_norm,
    triton=norm_triton.layer_norm,
    te=transformer_engine.layer_norm,
    packages={"liger": liger.layer_norm},
    preferred=("liger",),
)
_ADD_RMS_NORM = Kernel(
    "add_rms_norm",
    _of_sum(_rms_norm),
    triton=norm_triton.add_rms_norm,
    te=_of_sum(transformer_engine.rms_norm),
    packages={"liger": liger.add_rms_norm},
    preferred=("liger",),
)
_ADD_LAYER_NORM = Kernel(
    "add_layer_norm",
    _of_sum(_layer_norm),
    triton=norm_triton.add_layer_norm,
    te=_of_sum(transformer_engine.layer_norm),
)
