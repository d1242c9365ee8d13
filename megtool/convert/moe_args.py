"""Megatron's args for experts, latent attention and multi-token prediction, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.config import ModelConfig

# Keys of a rotary scaling of type `yarn`, as Megatron's args call them with latent attention and
# without, and what Megatron takes where nothing is said.
_YARN = (
    ("factor", "rotary_scaling_factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)
_ROUND = ("truncate", "yarn_correction_range_round_to_int")


def moe_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from args; those missing in args are omitted."""

    def get(name: str, default: Any) -> Any:
        value = args.get(name)
        return default if value is None else value

    mtp = int(get("mtp_num_layers", 0))
    out: dict[str, Any] = {
        "router_score": str(get("moe_router_score_function", "softmax")),
        "router_pre_softmax": bool(get("moe_router_pre_softmax", False)),
        "router_scaling": float(get("moe_router_topk_scaling_factor", 1.0)),
        "router_num_groups": int(get("moe_router_num_groups", 0)),
        "router_topk_groups": int(get("moe_router_group_topk", 0)),
        "router_expert_bias": bool(get("moe_router_enable_expert_bias", False)),
        "shared_expert_gate": bool(get("moe_shared_expert_gate", False)),
        "attn_sinks": get("softmax_type", "vanilla") == "learnable",
        "rope_interleaved": bool(get("rotary_interleaved", False)),
        "activation_limit": float(get("activation_func_clamp_value", 0.0)),
        "glu_offset": float(get("glu_linear_offset", 0.0)),
        "qk_l2_norm": bool(get("qk_l2_norm", False)),
        "router_scales_input": bool(get("moe_apply_probs_on_input", False)),
        "router_fp32": get("moe_router_dtype", None) is not None,
        "num_mtp_layers": min(mtp, 1) if get("mtp_use_repeated_layer", False) else mtp,
    }
    if get("multi_latent_attention", False):
        rope, nope = int(get("qk_pos_emb_head_dim", 64)), int(get("qk_head_dim", 128))
        out |= {
            "q_lora_rank": int(get("q_lora_rank", 0)),
            "kv_lora_rank": int(get("kv_lora_rank", 32)),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": int(get("v_head_dim", 128)),
            "head_dim": nope + rope,
            "num_kv_heads": int(args["num_attention_heads"]),
        }
        if get("rope_type", "yarn") == "yarn" and get("rotary_scaling_factor", 1.0) != 1:
            out["rope_scaling"] = _yarn(args, "")
    elif get("position_embedding_type", "") == "yarn":
        out["rope_scaling"] = _yarn(args, "yarn_")
    return out


def _yarn(args: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    values = {ours: args.get(prefix + megatron_name) for ours, megatron_name, _ in _YARN}
    values[_ROUND[0]] = args.get(_ROUND[1])
    return {"rope_type": "yarn"} | {k: v for k, v in values.items() if v is not None}


def moe_args(config: ModelConfig) -> dict[str, Any]:
    """Args from the fields of ModelConfig that `moe_fields` reads."""
    scaling = config.router_scaling
    is_quick = config.gated and config.activation == "quick_gelu"
    out: dict[str, Any] = {
        "moe_router_score_function": config.router_score,
        "moe_router_pre_softmax": config.router_pre_softmax,
        "moe_router_topk_scaling_factor": scaling if scaling != 1 else None,
        "moe_router_num_groups": config.router_num_groups or None,
        "moe_router_group_topk": config.router_topk_groups or None,
        "moe_router_enable_expert_bias": config.router_expert_bias,
        "moe_shared_expert_gate": config.shared_expert_gate,
        "softmax_type": "learnable" if config.attn_sinks else "vanilla",
        "quick_geglu": is_quick,
        "glu_linear_offset": config.glu_offset,
        "activation_func_clamp_value": config.activation_limit or None,
        "qk_l2_norm": config.qk_l2_norm,
        "moe_apply_probs_on_input": config.router_scales_input,
        "moe_router_dtype": "fp32" if config.router_fp32 else None,
        "mtp_num_layers": config.num_mtp_layers or None,
        "multi_latent_attention": bool(config.kv_lora_rank),
    }
    yarn = config.rope_scaling if is_yarn(config) else None
    if config.kv_lora_rank:
        out |= {
            "q_lora_rank": config.q_lora_rank or None,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "rope_type": "yarn" if yarn else "rope",
        }
    if yarn:
        prefix = "" if config.kv_lora_rank else "yarn_"
        out |= {
            prefix + megatron_name: yarn.get(ours, default)
            for ours, megatron_name, default in _YARN
        }
        if not config.kv_lora_rank:
            absent = {f"yarn_{k}": None for k in ("mscale", "mscale_all_dim") if k not in yarn}
            out |= absent | {
                "position_embedding_type": "yarn",
                _ROUND[1]: yarn.get(_ROUND[0], True),
            }
    return out


def is_yarn(config: ModelConfig) -> bool:
    """Whether the rotary scaling is YaRN's, which Megatron's args can express."""
    return config.rope_scaling is not None and config.rope_scaling.get("rope_type") == "yarn"
