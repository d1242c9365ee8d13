"""Llama 4, its text model alone: experts beside a shared one, fused and transposed."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Cat,
    Chunks,
    Default,
    Family,
    Key,
    MoeLayers,
    NoRope,
    Noted,
    Rope,
    Row,
    Stacked,
    Transposed,
)

_STORED, _MLP = "model.layers.{l}.feed_forward.", "layers.{l}.mlp."
_EXPERT = "layers.{l}.mlp.experts.{e}."

FAMILY = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM",),
    model_types=("llama4_text",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "rope_interleaved": True,
        "qk_l2_norm_unrotated": False,
        "router_score": "sigmoid",
        "router_scales_input": True,
    },
    limits=(
        (
            True,
            "attention in chunks, and queries that are scaled in layers without rotation and "
            "normalized in the others alone, have to be set by hand in Megatron",
        ),
    ),
    # Quantized experts lie in a tensor each: loaders (vLLM's, SGLang's) take codes of no others.
    # The intermediate size is that of experts, the routed and the shared one.
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Key("intermediate_size", "shared_ffn_hidden_size"),
        Key("intermediate_size_mlp", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "num_experts_per_token", 1),
        MoeLayers(step="interleave_moe_layer_step", moe="moe_layers"),
        Activation(),
        Rope(500000.0),
        NoRope(),
        Chunks(),
        Noted("use_qk_norm", "qk_l2_norm", True),
        Noted("attention_chunk_size", "attn_chunk_size", 8192, "x or 0"),
        Noted("floor_scale", "attn_temperature_floor", 8192, "x or 0"),
        Noted("attn_scale", "attn_temperature_scale", 0.1, "x or 0"),
        Noted(
            "attn_temperature_tuning",
            "attn_temperature_scale",
            Default("attn_temperature_scale"),
            "attn_temperature_scale if x else 0",
        ),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(_STORED + "gate_proj.weight", _MLP + "gate.weight"),
        Row(_STORED + "up_proj.weight", _MLP + "up.weight"),
        Row(_STORED + "down_proj.weight", _MLP + "down.weight"),
        Row(_STORED + "router.weight", _MLP + "router.weight"),
        Row(
            _STORED + "experts.gate_up_proj",
            Stacked(Transposed(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight")), "e"),
            plain=True,
        ),
        Row(
            _STORED + "experts.down_proj",
            Stacked(Transposed(_EXPERT + "down.weight"), "e"),
            plain=True,
        ),
        Row(_STORED + "experts.{e}.gate_proj.weight", _EXPERT + "gate.weight"),
        Row(_STORED + "experts.{e}.up_proj.weight", _EXPERT + "up.weight"),
        Row(_STORED + "experts.{e}.down_proj.weight", _EXPERT + "down.weight"),
        Row(_STORED + "shared_expert.gate_proj.weight", _MLP + "shared.gate.weight"),
        Row(_STORED + "shared_expert.up_proj.weight", _MLP + "shared.up.weight"),
        Row(_STORED + "shared_expert.down_proj.weight", _MLP + "shared.down.weight"),
    ),
)
