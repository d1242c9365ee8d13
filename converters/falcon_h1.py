"""Falcon-H1: Mamba-2 and attention side by side in every layer, before an MLP; multipliers."""

from megtool.convert import (
    HF_ATTENTION,
    HF_FEED_FORWARD,
    Default,
    Dropped,
    EveryLayer,
    Family,
    Key,
    MambaHeads,
    MambaScales,
    Noted,
    NotedList,
    OneOf,
    Only,
    Rope,
    Row,
    hf_mamba,
)

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."

FAMILY = Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        EveryLayer("M*-"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 8192),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        OneOf("hidden_act", "activation", ("silu",)),
        MambaHeads(inner="mamba_d_ssm"),
        Key("mamba_d_state", "mamba_state_dim", 256),
        Key("mamba_n_groups", "mamba_num_groups", 1),
        Key("mamba_d_conv", "mamba_conv_kernel", 4),
        Key("mamba_rms_norm", "mamba_norm", False),
        Noted("mamba_norm_before_gate", "mamba_norm_first", True),
        Only("mamba_conv_bias", True),
        Only("mamba_proj_bias", False),
        Only("projectors_bias", False),
        Rope(10000.0),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("lm_head_multiplier", "logit_scale", 1.0),
        Noted(
            "key_multiplier", "softmax_scale", Default("head_dim ** -0.5"), "x * head_dim ** -0.5"
        ),
        Noted("attention_in_multiplier", "attn_in_scale", 1.0),
        Noted("attention_out_multiplier", "attn_out_scale", 1.0),
        Noted("ssm_out_multiplier", "mamba_out_scale", 1.0),
        MambaScales("ssm_multipliers", "ssm_in_multiplier"),
        NotedList("mlp_multipliers", ("mlp_gate_scale", "mlp_out_scale")),
    ),
    hf=(
        Row("model.embed_tokens.weight", "embed.weight"),
        Row(_STORED + "input_layernorm.weight", _OURS + "attn_norm.weight"),
        *HF_ATTENTION,
        *hf_mamba(_STORED + "mamba."),
        *HF_FEED_FORWARD,
        Row("model.final_layernorm.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    limits=(
        (
            True,
            "names are those of Megatron-Bridge's layer, with one norm (`norm`) before Mamba-2 and "
            "attention instead of a copy in the projection of each",
        ),
    ),
)
