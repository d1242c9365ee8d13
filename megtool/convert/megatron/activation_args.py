"""The activation of MLPs in Megatron's args, both ways.

megatron-core's fused kernels (`bias_gelu_impl`, `bias_geglu_impl`) have the tanh form of GELU where
its plain path has the exact one, so that Megatron-LM's `bias_gelu_fusion`, which is on by default,
says which of them a model computes. Without biases its parser turns the fusion off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.megatron.arg_values import last_name
from megtool.spec.model_config import ModelConfig

TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_TANH = "gelu_pytorch_tanh"
# Functions by the last part of their names in PyTorch and Megatron, and Hugging Face's words.
FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
    "fast_gelu": _TANH,
    "openai_gelu": _TANH,
    "gelu_impl": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "xielu": "xielu",
    "XIELU": "xielu",
}
_FLAGS = (("swiglu", "silu"), ("squared_relu", "relu2"), ("quick_geglu", "quick_gelu"))


def activation_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `activation` and `gated` for args, as Megatron-LM's builder chooses them."""
    gated = any(bool(args.get(x)) for x in ("swiglu", "quick_geglu", "gated_linear_unit"))
    chosen = next((kind for flag, kind in _FLAGS if args.get(flag)), None)
    if chosen is None:
        chosen = FUNCTIONS.get(_function(args) or "gelu", "gelu")
    if chosen == "gelu" and _is_tanh(args, gated=gated):
        chosen = _TANH
    return {"activation": chosen, "gated": gated}


def other_function(args: Mapping[str, Any]) -> bool:
    """Return whether `activation_func` is no known function, or not the one that flags say."""
    name = _function(args)
    if name is None:
        return False
    flagged = [kind for flag, kind in _FLAGS if args.get(flag)]
    return name not in FUNCTIONS or bool(flagged and flagged[0] != FUNCTIONS[name])


def activation_args(config: ModelConfig) -> dict[str, Any]:
    """Return the args of a model's activation."""
    kind, gated = config.mlp.activation, config.mlp.gated
    is_tanh, has_fused_form = kind in TANH_GELUS, gated or config.mlp.mlp_bias
    return {
        "swiglu": gated and kind == "silu",
        "gated_linear_unit": gated,
        "squared_relu": kind == "relu2" and not gated,
        "quick_geglu": gated and kind == "quick_gelu",
        "openai_gelu": is_tanh and not gated,
        "bias_gelu_fusion": is_tanh if has_fused_form or not is_tanh else None,
    }


def lost_activation(config: ModelConfig) -> str | None:
    """Return what Megatron's args cannot say of the activation, as a sentence."""
    kind, gated, has_bias = config.mlp.activation, config.mlp.gated, config.mlp.mlp_bias
    if kind in TANH_GELUS:
        if gated or has_bias:
            return None
        return f"an MLP with {kind!r} and without biases: Megatron has its exact form there"
    known = ("silu", "quick_gelu", "gelu") if gated else ("relu2", "gelu")
    if kind in known:
        return None
    form = "a gated MLP" if gated else "an MLP"
    return f"{form} with {kind!r} has to be set by hand in Megatron"


def _function(args: Mapping[str, Any]) -> str | None:
    value = args.get("activation_func")
    return last_name(value) if isinstance(value, str) else None


def _is_tanh(args: Mapping[str, Any], *, gated: bool) -> bool:
    """Return whether GELU is the tanh form."""
    is_openai = bool(args.get("openai_gelu"))
    fusion = args.get("bias_gelu_fusion")
    if fusion is None:
        fusion = args.get("bias_activation_fusion")
    if fusion is None:  # args of megtool's own, or a part of Megatron's
        return gated or is_openai
    if not fusion:
        return is_openai and bool(args.get("use_legacy_models"))
    return gated or args.get("add_bias_linear") is not False
