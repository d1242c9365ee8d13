"""HyperCLOVA X: Granite's multipliers, and norms after both branches too."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    MEGATRON_POST_NORMS,
    Default,
    Family,
    Key,
    Noted,
    OneOf,
    Rope,
    Row,
    Weight,
)

_NORMS = (("post_norm1", "attn_post_norm"), ("post_norm2", "mlp_post_norm"))

FAMILY = Family(
    name="hyperclovax",
    architectures=("HyperCLOVAXForCausalLM",),
    model_types=("hyperclovax",),
    traits={"norm": "rmsnorm", "gated": True},
    vocabulary={
        f"layers.{{l}}.{name}.{part}": Weight(("hidden_size",), part == "weight", "post_norms")
        for part in ("weight", "bias")
        for _, name in _NORMS
    },
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
        OneOf("hidden_act", "activation", ("silu",)),
        Rope(10000.0),
        Key("use_post_norm", "post_norms", True),
        Noted("embedding_multiplier", "embedding_scale", 1.0),
        Noted("residual_multiplier", "residual_scale", 1.0),
        Noted("attention_multiplier", "softmax_scale", Default("head_dim ** -0.5"), "x + 0.0"),
        Noted("logits_scaling", "logit_scale", 1.0),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        *HF_GATED_MLP,
        *(
            Row(f"model.layers.{{l}}.{stored}.weight", f"layers.{{l}}.{ours}.weight")
            for stored, ours in _NORMS
        ),
    ),
    megatron=MEGATRON_POST_NORMS,
    limits=(
        (True, "Megatron has no multipliers of embeddings, attention, residuals, logits"),
        ("post_norms", "Megatron has no norms after attention and MLP (Megatron-Bridge has)"),
    ),
)
