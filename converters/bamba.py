"""Bamba: Mamba-2 in most layers and attention in some, each with an MLP."""

from megtool.convert import (
    HF_ATTENTION,
    HF_FEED_FORWARD,
    Default,
    Dropped,
    Family,
    Key,
    KindKey,
    LayerKinds,
    MambaHeads,
    OneOf,
    Only,
    Rope,
    Row,
    StepLimit,
    hf_mamba,
    in_branches,
)

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."

_LAYERS = (
    Row(_STORED + "input_layernorm.weight", _OURS + "attn_norm.weight"),
    *HF_ATTENTION,
    *hf_mamba(_STORED + "mamba."),
    *HF_FEED_FORWARD,
)

FAMILY = Family(
    name="bamba",
    architectures=("BambaForCausalLM",),
    model_types=("bamba",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 262144),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        OneOf("hidden_act", "activation", ("silu",)),
        LayerKinds(
            "attn_layer_indices",
            (("linear_attention", "M"), ("full_attention", "*")),
            feeds=True,
            by_number=True,
        ),
        MambaHeads(),
        KindKey("mamba_d_state", "mamba_state_dim", "M", 256),
        KindKey("mamba_n_groups", "mamba_num_groups", "M", 1),
        Key("mamba_d_conv", "mamba_conv_kernel", 4),
        StepLimit(),
        Only("mamba_conv_bias", True),
        Only("mamba_proj_bias", False),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.5),
    ),
    hf=(
        Row("model.embed_tokens.weight", "embed.weight"),
        *in_branches(_LAYERS),
        Row("model.final_layernorm.weight", "norm.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    limits=(("mamba_step_limit", "Megatron does not limit the steps (dt) of Mamba-2"),),
)
