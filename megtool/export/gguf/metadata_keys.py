"""Metadata keys of a GGUF file that describe the model, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from typing import Any

from megtool.config import ModelConfig
from megtool.convert.gguf import ROPE_SCALING
from megtool.export.gguf.architectures import Architecture
from megtool.export.gguf.rope_scaling import build_rotary_keys, original_length, read_scaling
from megtool.number_formats.gguf import package

_QUANTIZATION_VERSION = 2


def build_model_keys(
    config: ModelConfig, architecture: Architecture, *, name: str, kind: str
) -> dict[str, Any]:
    """`general.*` and the architecture's own keys; ints are u32, floats f32 in the file.

    Raises:
        MappingError: see `rotary_keys`.
    """
    out: dict[str, Any] = {
        "general.type": "model",
        "general.name": name,
        "general.quantization_version": _QUANTIZATION_VERSION,
        "general.file_type": _file_type(kind),
    }
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_hidden_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
    }
    if architecture.has_window:
        keys["attention.sliding_window"] = config.window_size
    if config.attn_softcap:
        keys["attn_logit_softcapping"] = float(config.attn_softcap)
    if config.logit_softcap:
        keys["final_logit_softcapping"] = float(config.logit_softcap)
    if config.num_experts:
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_token,
            "expert_feed_forward_length": config.moe_ffn_hidden_size,
        }
    if config.shared_ffn_hidden_size:
        keys["expert_shared_feed_forward_length"] = config.shared_ffn_hidden_size
    keys |= {f"rope.{k}": v for k, v in build_rotary_keys(config, architecture).items()}
    out |= {f"{architecture.name}.{k}": v for k, v in keys.items()}
    scaled, scaling = read_scaling(config)
    if scaled:
        stored = dict(scaling)
        if scaled == "longrope":
            stored["original_max_position_embeddings"] = original_length(config)
        out[ROPE_SCALING] = json.dumps(stored, sort_keys=True)
    return out


def _file_type(kind: str) -> int:
    """What llama.cpp calls a file most of whose weights are of this type."""
    kinds = package().LlamaFileType
    names = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
    return int(kinds[names.get(kind, f"MOSTLY_{kind}")])
