"""Qwen3, dense: Llama's layout with a norm on the queries and keys of every head."""

from megtool.convert import (
    GGUF_DECODER,
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    Default,
    Family,
    Key,
    OneOf,
    Rope,
    Window,
)

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    gguf_architectures=("qwen3",),
    traits={"norm": "rmsnorm", "gated": True, "qk_norm": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        OneOf("hidden_act", "activation", ("silu",)),
        Rope(10000.0),
        Window(switch="use_sliding_window", first_key="max_window_layers"),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_QK_NORMS, *HF_GATED_MLP),
    gguf=GGUF_DECODER,
)
