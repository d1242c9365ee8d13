"""Qwen3.5 and 3.6 with experts, text alone: layers as in `qwen3_5_text`, experts beside one."""

from megtool.convert import (
    HF_DELTA_NET,
    HF_DELTA_NET_INPUTS,
    HF_EXPERTS,
    HF_GATED_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    HF_SHARED_EXPERT,
    Assumed,
    Family,
    Key,
    LayerKinds,
    OneOf,
    Only,
    Refused,
    Rope,
    also_named,
    hf_outer_mtp,
)

_LAYERS = (
    *HF_NORMS,
    *HF_GATED_ATTENTION,
    *HF_QK_NORMS,
    *HF_EXPERTS,
    *HF_SHARED_EXPERT,
)
_ROWS = (*HF_MODEL, *_LAYERS, *HF_DELTA_NET_INPUTS, *HF_DELTA_NET)

FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    model_types=("qwen3_5_moe_text",),
    traits={
        "norm": "rmsnorm",
        "zero_centered_norm": True,
        "gated": True,
        "activation": "silu",
        "qk_norm": True,
        "attn_output_gate": True,
        "shared_expert_gate": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("num_attention_heads", "num_heads", 16),
        Key("num_key_value_heads", "num_kv_heads", 2),
        Key("head_dim", "head_dim", 256),
        Key("vocab_size", "vocab_size", 248320),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Refused("attn_output_gate", False, "attention without a gate"),
        Key("num_experts", "num_experts", 256),
        Key("num_experts_per_tok", "num_experts_per_token", 8),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", 512),
        Key("shared_expert_intermediate_size", "shared_ffn_hidden_size", 512),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),  # no layer has it
        LayerKinds(
            "layer_types",
            (("linear_attention", "G"), ("full_attention", "*")),
            feeds=True,
            every_key="full_attention_interval",
            every=4,
        ),
        Key("linear_num_key_heads", "linear_num_key_heads", 16),
        Key("linear_num_value_heads", "linear_num_value_heads", 32),
        Key("linear_key_head_dim", "linear_key_head_dim", 128),
        Key("linear_value_head_dim", "linear_value_head_dim", 128),
        Key("linear_conv_kernel_dim", "linear_conv_kernel", 4),
        Only("hidden_act", "silu"),
        OneOf("mtp_num_hidden_layers", "num_mtp_layers", (0, 1)),
        Refused("mtp_use_dedicated_embeddings", True, "embeddings of multi-token prediction alone"),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.25),
    ),
    # A text model that transformers takes out of a larger one keeps the names it has there.
    hf=(
        *also_named(_ROWS, "model.", "model.language_model."),
        *hf_outer_mtp(_LAYERS),
    ),
)
