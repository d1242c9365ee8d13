"""EXAONE 4: norms after attention and MLP alone, no rotary embedding in layers without a window."""

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
    RopeInWindows,
    Window,
)

FAMILY = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    model_types=("exaone4",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 32),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Activation(),
        Rope(10000.0),
        Window(default=4096, every=4, every_key="sliding_window_pattern"),
        RopeInWindows(without_key=True),
    ),
    hf=(*HF_MODEL, *HF_POST_NORMS, *HF_ATTENTION, *HF_QK_NORMS, *HF_GATED_MLP),
    vocabulary=POST_NORM_WEIGHTS,
    megatron=MEGATRON_POST_NORMS,
    limits=(
        (
            True,
            "Megatron has norms before attention and MLP, not after them alone",
        ),
    ),
)
