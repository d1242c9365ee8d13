"""Jais 2: layer norms, biases everywhere, and a squared-ReLU MLP without a gate."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Rope,
)

FAMILY = Family(
    name="jais2",
    architectures=("Jais2ForCausalLM",),
    model_types=("jais2",),
    traits={"norm": "layernorm", "gated": False},
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
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_bias", "attn_out_bias", True),
        Key("mlp_bias", "mlp_bias", True),
        Activation("hidden_act", "relu2"),
        Rope(10000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
)
