"""Hy3 (Hunyuan v3): norms of queries and keys before their rotation, and DeepSeek-V3's experts."""

from megtool.convert import (
    HF_ATTENTION,
    HF_EXPERTS,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    Activation,
    Default,
    Family,
    Key,
    MoeLayers,
    Multiple,
    Only,
    Rope,
    Row,
    ScoreNorm,
)

_STORED, _OURS = "model.layers.{l}.mlp.", "layers.{l}.mlp."

FAMILY = Family(
    name="hy_v3",
    architectures=("HYV3ForCausalLM",),
    model_types=("hy_v3",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "router_score": "sigmoid",
        "router_expert_bias": True,
        "router_fp32": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads"), absent=128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Only("mlp_bias", False),
        Key("num_experts", "num_experts", 192),
        Key("num_experts_per_tok", "num_experts_per_token", 8),
        ScoreNorm(None),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", 1536),
        Multiple(
            "num_shared_experts", "shared_ffn_hidden_size", unit="moe_ffn_hidden_size", absent=1
        ),
        MoeLayers(first="first_k_dense_replace", types="mlp_layer_types", num_dense=1),
        Key("router_scaling_factor", "router_scaling", 2.826),
        Activation(),
        Rope(11158840.0),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        *HF_QK_NORMS,
        *HF_GATED_MLP,
        Row(
            _STORED + "router.gate.weight",
            _OURS + "router.weight",
            also=(_STORED + "gate.weight",),
        ),
        Row(
            _STORED + "expert_bias",
            _OURS + "router.expert_bias",
            also=(_STORED + "e_score_correction_bias",),
        ),
        *HF_EXPERTS[1:],
        Row(
            _STORED + "shared_mlp.gate_proj.weight",
            _OURS + "shared.gate.weight",
            also=(_STORED + "shared_experts.gate_proj.weight",),
        ),
        Row(
            _STORED + "shared_mlp.up_proj.weight",
            _OURS + "shared.up.weight",
            also=(_STORED + "shared_experts.up_proj.weight",),
        ),
        Row(
            _STORED + "shared_mlp.down_proj.weight",
            _OURS + "shared.down.weight",
            also=(_STORED + "shared_experts.down_proj.weight",),
        ),
    ),
)
