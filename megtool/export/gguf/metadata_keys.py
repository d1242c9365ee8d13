"""Metadata keys of a GGUF file that describe the model, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.console import single_line
from megtool.convert.gguf import (
    LLAMA3,
    LONG,
    ROPE_SCALING,
    SHORT,
    llama3_factors,
    longrope_temperature,
)
from megtool.errors import MappingError
from megtool.export.gguf.architecture import Architecture
from megtool.number_formats.gguf import package
from megtool.spec.model_config import ModelConfig

_QUANTIZATION_VERSION = 2
_EPSILONS = {
    "rmsnorm": "attention.layer_norm_rms_epsilon",
    "layernorm": "attention.layer_norm_epsilon",
}


def build_model_keys(
    config: ModelConfig, architecture: Architecture, *, name: str, file_type: str
) -> dict[str, Any]:
    """`general.*` and the architecture's own keys; ints are u32, floats f32 in the file.

    Raises:
        MappingError: see `rotary_keys`.
    """
    out: dict[str, Any] = {
        "general.type": "model",
        "general.name": single_line(name),
        "general.quantization_version": _QUANTIZATION_VERSION,
        "general.file_type": _find_file_type(file_type),
    }
    keys: dict[str, Any] = {
        "vocab_size": config.embedding.vocab_size,
        "context_length": config.positions.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp.ffn_hidden_size,
        "attention.head_count": config.attention.num_heads,
        "attention.head_count_kv": config.attention.num_kv_heads,
        "attention.key_length": config.attention.head_dim,
        "attention.value_length": config.attention.value_size,
        _EPSILONS[config.norms.norm]: float(config.norms.norm_eps),
    }
    if architecture.scales_logits:
        keys["logit_scale"] = float(config.head.logit_scale)
    if architecture.has_window:
        keys["attention.sliding_window"] = config.window.window_size
    if config.attention.attn_softcap:
        keys["attn_logit_softcapping"] = float(config.attention.attn_softcap)
    if config.head.logit_softcap:
        keys["final_logit_softcapping"] = float(config.head.logit_softcap)
    if config.moe.num_experts:
        keys |= {
            "expert_count": config.moe.num_experts,
            "expert_used_count": config.moe.num_experts_per_token,
            "expert_feed_forward_length": config.moe.moe_ffn_hidden_size,
        }
    if config.moe.shared_ffn_hidden_size:
        keys["expert_shared_feed_forward_length"] = config.moe.shared_ffn_hidden_size
    if config.positions.position_embedding == "rope":
        keys |= {f"rope.{k}": v for k, v in build_rotary_keys(config, architecture).items()}
    if architecture.keys is not None:
        keys |= architecture.keys(config)
    out |= {f"{architecture.name}.{k}": v for k, v in keys.items()}
    scaled, scaling = read_scaling(config)
    if scaled:
        stored = dict(scaling)
        if scaled == "longrope":
            stored["original_max_position_embeddings"] = original_length(config)
        out[ROPE_SCALING] = json.dumps(stored, sort_keys=True)
    return out


def _find_file_type(name: str) -> int:
    """What llama.cpp calls a file most of whose weights are of this type."""
    kinds = package().LlamaFileType
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    return int(kinds[names.get(name, f"MOSTLY_{name}")])


_STANDING = 1e30
"""What llama.cpp's converter divides the frequencies of elements by that do not turn."""

RopeFactors = dict[str, NDArray[np.float32]]


def read_scaling(config: ModelConfig) -> tuple[str, Mapping[str, Any]]:
    """The kind of scaling ("" for none) and its numbers."""
    scaling = config.positions.rope_scaling or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    return ("" if kind == "default" else "longrope" if kind == "su" else kind), scaling


def original_length(config: ModelConfig) -> int:
    """The positions a model was trained for before its scaling."""
    key = "original_max_position_embeddings"
    scaling = config.positions.rope_scaling or {}
    return int(scaling.get(key) or config.extra.get(key) or config.positions.max_positions)


def build_rotary_keys(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Keys under `ARCHITECTURE.rope.`.

    Raises:
        MappingError: llama.cpp has no such scaling, or not in this architecture.
    """
    kind, scaling = read_scaling(config)
    turned = int(config.attention.head_dim * config.positions.rotary_percent)
    out: dict[str, Any] = {
        "dimension_count": turned,
        "freq_base": float(config.positions.rope_base),
    }
    if config.positions.rope_local_base is not None:
        out["freq_base_swa"] = float(config.positions.rope_local_base)
    if kind == "dynamic" and scaling.get("alpha"):  # of Hunyuan: a larger base, and no scaling
        grown = float(scaling["alpha"]) ** (turned / (turned - 2))
        return out | {"freq_base": float(config.positions.rope_base) * grown}
    if not kind or (kind in ("llama3", "proportional") and architecture.factors == kind):
        return out
    if kind == "longrope" and architecture.factors == kind:
        original = original_length(config)
        scale = scaling.get("attention_factor")
        if scale is None:
            scale = longrope_temperature(config.positions.max_positions, original)
        return out | {
            "scaling.attn_factor": float(scale),
            "scaling.original_context_length": original,
        }
    if kind == "linear":
        return out | {"scaling.type": "linear", "scaling.factor": float(scaling["factor"])}
    odd = _odd_yarn(scaling, architecture) if kind == "yarn" else ""
    if kind == "yarn" and not odd:
        original = original_length(config)
        factor = float(scaling.get("factor") or config.positions.max_positions / original)
        out |= {"scaling.type": "yarn", "scaling.factor": factor}
        out["scaling.original_context_length"] = original
        for key in ("beta_fast", "beta_slow"):
            if scaling.get(key):
                out[f"scaling.yarn_{key}"] = float(scaling[key])
        if scaling.get("mscale_all_dim") and architecture.yarn:
            # Of DeepSeek's files, a tenth of it.
            unit = 0.1 if architecture.yarn == "deepseek" else 1.0
            out["scaling.yarn_log_multiplier"] = unit * float(scaling["mscale_all_dim"])
        return out
    can = ["linear", "yarn", *([architecture.factors] if architecture.factors else [])]
    raise MappingError(
        f"rope_scaling is of the kind {kind!r}{odd}, which llama.cpp's {architecture.name!r} "
        "does not compute",
        hint=f"it does: {', '.join(can)}",
        error_id="unsupported-by-engine",
    )


def _odd_yarn(scaling: Mapping[str, Any], architecture: Architecture) -> str:
    """What llama.cpp's YaRN cannot do; it rounds the range of its ramp to whole frequencies."""
    temperature, factor = scaling.get("attention_factor"), float(scaling.get("factor") or 1)
    usual = 1 + 0.1 * math.log(factor)
    is_odd = temperature is not None and not math.isclose(temperature, usual, rel_tol=1e-5)
    whole, part = scaling.get("mscale_all_dim"), scaling.get("mscale")
    if architecture.yarn == "unscaled":
        is_odd = temperature not in (None, 1.0) or bool(whole or part)
    elif architecture.yarn:
        is_odd |= whole != part or not whole
    else:
        is_odd |= bool(whole or part)
    if is_odd:
        return " with a temperature of its own"
    is_exact = scaling.get("truncate") is False and not architecture.rounds_yarn
    return " with a ramp that is not rounded (truncate)" if is_exact else ""


def build_rope_factors(config: ModelConfig) -> RopeFactors:
    """What frequencies are divided by, where llama.cpp reads that from tensors.

    Raises:
        MappingError: factors of another number than there are frequencies.
    """
    kind, scaling = read_scaling(config)
    half = int(config.attention.head_dim * config.positions.rotary_percent) // 2
    if kind == "llama3":
        factors = llama3_factors(
            float(config.positions.rope_base),
            half,
            factor=float(scaling["factor"]),
            low=float(scaling["low_freq_factor"]),
            high=float(scaling["high_freq_factor"]),
            length=original_length(config),
        )
        return {LLAMA3: factors}
    if kind == "proportional":
        turning = int(scaling.get("partial_rotary_factor", 1.0) * half)
        still = np.full(half - turning, _STANDING, np.float32)
        factor = np.full(turning, scaling.get("factor", 1.0), np.float32)
        return {LLAMA3: np.concatenate([factor, still])}
    if kind != "longrope":
        return {}
    out: RopeFactors = {}
    for length, name in (("long", LONG), ("short", SHORT)):
        values = np.array(scaling[f"{length}_factor"], np.float32)
        if values.shape != (half,):
            raise MappingError(
                f"rope_scaling has {len(values)} {length} factors, and {half} frequencies"
            )
        out[name] = values
    return out
