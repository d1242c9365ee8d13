"""Command R7B and A: Command R with windows in three of four layers, which alone rotate."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    Activation,
    Default,
    Family,
    Key,
    Noted,
    Rope,
    RopeInWindows,
    Row,
    Window,
)

FAMILY = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    traits={
        "norm": "layernorm",
        "norm_bias": False,
        "shared_norm": True,
        "parallel_residual": True,
        "gated": True,
        "rope_interleaved": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 8192),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Activation(),
        Rope(10000.0),
        Window(default=4096, every=4, every_key="sliding_window_pattern"),
        RopeInWindows(),
        Noted("logit_scale", "logit_scale", 0.0625),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        *HF_ATTENTION,
        *HF_GATED_MLP,
    ),
    limits=(
        (True, "Megatron's layer norms have a bias, and none feeds attention and MLP at once"),
        (True, "Megatron has no multiplier of logits"),
    ),
)
