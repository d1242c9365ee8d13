"""Helium: Llama's layout, rotating pairs that lie side by side."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Only,
    Rope,
)

FAMILY = Family(
    name="helium",
    architectures=("HeliumForCausalLM",),
    model_types=("helium",),
    traits={"norm": "rmsnorm", "gated": True, "rope_interleaved": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 4096),
        Key("rms_norm_eps", "norm_eps", 1e-8),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Only("mlp_bias", False),
        Activation(),
        Rope(100000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
)
