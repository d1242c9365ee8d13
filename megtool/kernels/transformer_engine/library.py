"""Transformer Engine's kernels, if requested: loading it, norms and activations.

`SCOPE` says which operations it runs, and that all others are megtool's own. Its modules are in
`linear` and `norm_linear` beside this one, `kernels.experts.transformer_engine` and
`kernels.attention.transformer_engine`, its recipes in `optim.fp8.transformer_engine`, and its Adam
in `optim.te_adam`; `train.features.te_layers` chooses the layers that have them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megtool.errors import MissingPackageError

INSTALL = "pip install --no-build-isolation 'megtool[te]'"
_LEAST = (2, 9)
SCOPE = (
    "Transformer Engine runs the norms that have weights, and the activations silu, quick_gelu, "
    "relu, relu2 and gelu by tanh, gated or not, without limit and offset (but not exact gelu), "
    "in 16 bits attention of whole rows, also with sinks, or within documents, chunks and windows "
    "(without soft caps, biases and dropout), and in training Adam, and in 16 bits or FP8 norms "
    "together with the linear layer or the MLP behind them, and experts (`finetune --dry-run` "
    "shows which); rotary embedding, other attention, dispatch to experts and cross entropy are "
    "megtool's own kernels, and other matrix products torch's, but for linear layers in FP8 "
    "(--fp8-recipe), which are Transformer Engine's"
)

# Our names of activations; its "gelu" is the tanh approximation, and it has no exact one.
PLAIN = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "qgelu",
    "relu": "relu",
    "relu2": "srelu",
}
GATED = {
    "silu": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "quick_gelu": "qgeglu",
    "relu": "reglu",
    "relu2": "sreglu",
}
KINDS = frozenset(PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The package, imported: `pytorch` its module of layers, `functions` its compiled kernels."""

    pytorch: Any
    functions: Any
    dtypes: Any


def require(device_kind: str) -> None:
    """Make sure that Transformer Engine runs on devices of a kind, such as "cuda".

    Raises:
        MissingPackageError: it is not installed, too old, cannot be loaded, or `device_kind` is
            not "cuda".
    """
    if find_spec("transformer_engine") is None:
        raise MissingPackageError(
            "kernels 'te' were requested, but Transformer Engine is not installed", hint=INSTALL
        )
    if device_kind != "cuda":
        raise MissingPackageError(
            f"kernels 'te' were requested on the device {device_kind!r}, and Transformer Engine "
            "runs on CUDA alone",
            hint="use a CUDA device, or kernels 'torch'",
            error_id="missing-device",
        )
    load()


@cache
def load() -> Loaded:
    """Import Transformer Engine.

    On a torch without CUDA its import does not fail with ImportError, but with RuntimeError
    ("cudnn shared object not found") or OSError.

    Raises:
        MissingPackageError: it is not installed, older than 2.9, or its import fails.
    """
    try:
        installed = version("transformer-engine")
        pytorch = importlib.import_module("transformer_engine.pytorch")
        functions = importlib.import_module("transformer_engine_torch")
        constants = importlib.import_module("transformer_engine.pytorch.constants")
    except PackageNotFoundError as error:
        raise MissingPackageError("Transformer Engine is not installed", hint=INSTALL) from error
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        raise MissingPackageError(
            f"Transformer Engine is installed but cannot be loaded: {str(error).strip()!r}",
            hint=f"it needs a torch with CUDA, and a build that matches it: {INSTALL}",
        ) from error
    if tuple(int(n) for n in installed.split(".")[:2]) < _LEAST:
        raise MissingPackageError(f"Transformer Engine is {installed}", hint=INSTALL)
    return Loaded(pytorch=pytorch, functions=functions, dtypes=constants.TE_DType)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """See `norm.rms_norm`; it needs a weight."""
    out: Tensor = _RmsNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """See `norm.layer_norm`."""
    shift = torch.zeros_like(weight) if bias is None else bias
    out: Tensor = _LayerNorm.apply(x, weight, shift, eps, zero_centered)  # type: ignore[no-untyped-call]
    return out


def activate(x_TF: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    """See `activation.activate`; `kind` is one of KINDS."""
    x = x_TF if bias is None else x_TF + bias
    out: Tensor = _Activate.apply(x, PLAIN[kind])  # type: ignore[no-untyped-call]
    return out


def gated(x_T2F: Tensor, kind: str, bias: Tensor | None, limit: float, offset: float) -> Tensor:
    """See `activation.gated`; `kind` is one of KINDS, without limit and offset."""
    x = x_T2F if bias is None else x_T2F + bias
    out: Tensor = _Activate.apply(x, GATED[kind])  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        te = load()
        rows = x.contiguous().view(-1, x.shape[-1])
        scale = weight.to(x.dtype)
        out, _, inverse = te.functions.rmsnorm_fwd(
            rows, scale, eps, None, None, te.dtypes[x.dtype], 0, zero_centered
        )
        ctx.save_for_backward(rows, scale, inverse)
        ctx.way = (zero_centered, weight.dtype)
        normed: Tensor = out.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, scale, inverse = ctx.saved_tensors
        zero_centered, dtype = ctx.way
        dx, d_weight = load().functions.rmsnorm_bwd(
            grads[0].contiguous().view(rows.shape), rows, inverse, scale, 0, zero_centered
        )
        return dx.view(grads[0].shape), d_weight.to(dtype), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
    ) -> Tensor:
        te = load()
        rows = x.contiguous().view(-1, x.shape[-1])
        scale, shift = weight.to(x.dtype), bias.to(x.dtype)
        out, mean, inverse = te.functions.layernorm_fwd(
            rows, scale, shift, eps, None, None, te.dtypes[x.dtype], 0, zero_centered
        )
        ctx.save_for_backward(rows, scale, mean, inverse)
        ctx.way = (zero_centered, weight.dtype, bias.dtype)
        normed: Tensor = out.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, scale, mean, inverse = ctx.saved_tensors
        zero_centered, dtype, bias_dtype = ctx.way
        dx, d_weight, d_bias = load().functions.layernorm_bwd(
            grads[0].contiguous().view(rows.shape), rows, mean, inverse, scale, 0, zero_centered
        )
        return dx.view(grads[0].shape), d_weight.to(dtype), d_bias.to(bias_dtype), None, None


class _Activate(torch.autograd.Function):
    """`name` is Transformer Engine's; its backward is called d`name`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        out: Tensor = getattr(load().functions, name)(x.contiguous(), None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_name = getattr(load().functions, f"d{ctx.name}")
        return d_name(grads[0].contiguous(), x.contiguous(), None), None
