"""OLMo 3: OLMo 2 with windows in three of four layers, which have an unscaled rotary embedding."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_POST_NORMS,
    HF_QK_NORMS,
    MEGATRON_POST_NORMS,
    POST_NORM_WEIGHTS,
    Activation,
    Default,
    Family,
    Key,
    Rope,
    Window,
)

FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
        "qk_norm_of": "all",
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
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Activation(),
        Rope(500000.0, local_base=500000.0, by_kind=True),
        Window(default=4096, every=4),
    ),
    hf=(*HF_MODEL, *HF_POST_NORMS, *HF_ATTENTION, *HF_QK_NORMS, *HF_GATED_MLP),
    vocabulary=POST_NORM_WEIGHTS,
    megatron=MEGATRON_POST_NORMS,
    limits=(
        (
            True,
            "Megatron has norms before attention and MLP, not after them alone",
        ),
        (True, "Megatron normalizes queries and keys head by head, not all heads at once"),
    ),
)
