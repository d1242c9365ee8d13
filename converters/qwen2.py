"""Qwen2 and Qwen2.5: Llama's layout with biases on queries, keys and values alone."""

from megtool.convert import (
    GGUF_DECODER,
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Rope,
    Window,
)

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    gguf_architectures=("qwen2",),
    traits={"norm": "rmsnorm", "gated": True, "qkv_bias": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Activation(),
        Rope(10000.0),
        Window(switch="use_sliding_window", first_key="max_window_layers"),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
    gguf=GGUF_DECODER,
)
