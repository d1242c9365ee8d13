"""ERNIE 4.5, dense: Llama's layout, heads turned pair by pair, a bias everywhere or nowhere."""

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
)

FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    model_types=("ernie4_5",),
    gguf_architectures=("ernie4_5",),
    traits={"norm": "rmsnorm", "gated": True, "rope_interleaved": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=2),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads"), absent=128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("use_bias", "qkv_bias", False),
        Key("use_bias", "attn_out_bias", False),
        Key("use_bias", "mlp_bias", False),
        Activation(),
        Rope(500000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
    gguf=GGUF_DECODER,
)
