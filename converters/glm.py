"""GLM-4 (9B, 2024): Llama with fused MLPs, biases of queries, keys, values; half a head turns."""

from megtool.convert import (
    HF_ATTENTION,
    HF_FUSED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Family,
    Key,
    Rope,
)

FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    traits={"norm": "rmsnorm", "gated": True, "rope_interleaved": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 2),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1.5625e-7),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", True),
        Activation(),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.5),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_FUSED_MLP),
)
