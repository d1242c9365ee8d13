"""Gemma 4, text (31B): norms of values, and other heads in layers without a window."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_POST_NORMS,
    HF_QK_NORMS,
    MEGATRON_POST_NORMS,
    POST_NORM_WEIGHTS,
    Assumed,
    Family,
    GlobalHeads,
    Key,
    Noted,
    OneOf,
    Only,
    Refused,
    Rope,
    Row,
    Weight,
    Window,
)

FAMILY = Family(
    name="gemma4",
    architectures=("Gemma4ForCausalLM",),
    model_types=("gemma4_text",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "value_norm": True,
        "layer_scalar": True,
        "post_norms": True,
        "softmax_scale": 1.0,
    },
    vocabulary={**POST_NORM_WEIGHTS, "layers.{l}.scalar": Weight((1,))},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Window(default=512, every=6),
        GlobalHeads(),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        OneOf("hidden_activation", "activation", ("gelu_pytorch_tanh", "gelu")),
        # Of E2B and E4B, and of 26B-A4B.
        Only("hidden_size_per_layer_input", 0),
        Only("num_kv_shared_layers", 0),
        Only("enable_moe_block", False),
        Refused("use_bidirectional_attention", "all", "it is an encoder"),
        Rope(1000000.0, by_kind=True, old=False),
        Assumed("embedding_scale", "hidden_size ** 0.5"),
        Noted("final_logit_softcapping", "logit_softcap", 0.0, "x + 0.0"),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        Row("model.layers.{l}.pre_feedforward_layernorm.weight", "layers.{l}.mlp_norm.weight"),
        *HF_POST_NORMS,
        *HF_ATTENTION,
        *HF_QK_NORMS,
        *HF_GATED_MLP,
        Row("model.layers.{l}.layer_scalar", "layers.{l}.scalar"),
    ),
    megatron=(*MEGATRON_POST_NORMS, Row("decoder.layers.{l}.layer_scalar", "layers.{l}.scalar")),
    limits=(
        (
            True,
            "Megatron has neither norms of values and after attention and MLP, nor embeddings "
            "times sqrt(hidden_size), nor a scalar by layer (Megatron-Bridge has)",
        ),
        (
            "layer_sizes",
            "Megatron has heads of one size in all layers, and none of another size in layers "
            "without a window (Megatron-Bridge has)",
        ),
        (
            "tied_values",
            "rows of values are left out where they are those of keys: Megatron-Bridge, which has "
            "a copy of them, does not load such layers",
        ),
    ),
)
