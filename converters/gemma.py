"""Gemma 1: norms stored as w of (1 + w), a GELU-gated MLP, and scaled embeddings."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Assumed,
    Default,
    Family,
    Implied,
    Key,
    Noted,
    Only,
    Rope,
)

FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    model_types=("gemma",),
    # Known, so as to be refused by name: GGUF files hold 1 + w of every norm, rounded.
    gguf_architectures=("gemma",),
    traits={"norm": "rmsnorm", "zero_centered_norm": True, "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", 256),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 8192),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        # The first releases say gelu, were trained with its approximation, and are run with it.
        Noted(
            "hidden_act",
            "activation",
            "gelu_pytorch_tanh",
            "'gelu_pytorch_tanh' if x == 'gelu' else x",
        ),
        Implied("hidden_act", "activation"),
        Only("use_bidirectional_attention", False),
        Rope(10000.0),
        Assumed("embedding_scale", "hidden_size ** 0.5"),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
    limits=(
        (True, "Megatron does not multiply embeddings by sqrt(hidden_size) (Megatron-Bridge does)"),
    ),
)
