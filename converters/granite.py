"""Granite 3, dense: Llama's layout with four multipliers."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Noted,
    Rope,
)

FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Activation(),
        Rope(10000.0),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("residual_multiplier", "residual_scale", 1.0),
        Noted("attention_multiplier", "softmax_scale", 1.0, "x + 0.0"),
        Noted("logits_scaling", "logit_scale", 1.0, "1 / x"),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
    limits=((True, "Megatron has no multipliers of embeddings, attention, residuals, logits"),),
)
