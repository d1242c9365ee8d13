"""Norms and gated activations by Liger Kernel.

Held against the sources of liger-kernel 0.8.5 (`ops/rms_norm.py`, `ops/layer_norm.py`,
`ops/fused_add_rms_norm.py`, `ops/swiglu.py`, `ops/geglu.py`). Its casting mode "gemma" is the one
that computes in fp32 and rounds once, as megtool does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.kernels import peers
from megtool.kernels.dispatch import Chosen
from megtool.kernels.launch import LONGEST_ROW

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_GATED = {"silu": "LigerSiLUMulFunction", "gelu_pytorch_tanh": "LigerGELUMulFunction"}


def cannot(x: Tensor, *others: Tensor | None, zero_centered: bool = False) -> tuple[Chosen, ...]:
    """Return ("liger",) where it does not compute a norm as megtool does.

    It is for rows of at most 65536 elements, and needs all of `others` (a weight, a bias, or a
    residual). Layer norms have no zero-centered weights there.
    """
    fits = x.dtype in _TYPES and 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0
    has_all = all(other is not None for other in others)
    return () if fits and has_all and not zero_centered else ("liger",)


def cannot_gate(kind: str, *, limit: float, offset: float) -> tuple[Chosen, ...]:
    """Return ("liger",) where it has no such gated activation."""
    return () if kind in _GATED and not limit and not offset else ("liger",)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """See `norm.rms_norm`; it needs a weight."""
    args = (x, weight, eps, float(zero_centered), "gemma", False)
    out: Tensor = peers.apply("liger", "LigerRMSNormFunction", *args)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """See `norm.layer_norm`; it needs a bias, and takes no zero-centered weight."""
    out: Tensor = peers.apply("liger", "LigerLayerNormFunction", x, weight, bias, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`; both tensors have one dtype."""
    args = (x, residual, weight, eps, float(zero_centered), "gemma", False)
    normed, total = peers.apply("liger", "LigerFusedAddRMSNormFunction", *args)
    return normed, total


def gated(x_T2F: Tensor, kind: str, bias: Tensor | None, limit: float, offset: float) -> Tensor:
    """See `activation.gated`; without limit and offset.

    Gate and up are copied apart first, which costs more memory traffic than the activation itself:
    `auto` does not take it.
    """
    gate, up = (x_T2F if bias is None else x_T2F + bias).chunk(2, -1)
    out: Tensor = peers.apply("liger", _GATED[kind], gate, up)
    return out
