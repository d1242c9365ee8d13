"""LFM2: gated short convolutions in most layers, attention in the others."""

from megtool.convert import (
    HF_LFM2_ATTENTION,
    HF_LFM2_MLP,
    HF_LFM2_MODEL,
    HF_SHORT_CONV,
    AdjustedFeedForward,
    Default,
    EitherKey,
    Family,
    Key,
    LayerKinds,
    Rope,
)

FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    model_types=("lfm2",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu", "qk_norm": True},
    config=(
        Key("num_hidden_layers", "num_layers", 32),
        Key("hidden_size", "hidden_size", 2560),
        AdjustedFeedForward(),
        Key("num_attention_heads", "num_heads", 32),
        Key("num_key_value_heads", "num_kv_heads", 8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size", 65536),
        Key("max_position_embeddings", "max_positions", 128000),
        Key("norm_eps", "norm_eps", 1e-5),
        EitherKey(("tie_word_embeddings", "tie_embedding"), "tied_embeddings", True),
        LayerKinds(
            "layer_types",
            (("conv", "c"), ("full_attention", "*")),
            feeds=True,
            numbers_key="full_attn_idxs",
        ),
        Key("conv_L_cache", "short_conv_taps", 3),
        Key("conv_bias", "short_conv_bias", False),
        Rope(1000000.0),
    ),
    hf=(*HF_LFM2_MODEL, *HF_LFM2_ATTENTION, *HF_SHORT_CONV, *HF_LFM2_MLP),
    limits=(("conv_layers", "Megatron has no layers of gated short convolutions"),),
)
