"""Seed-OSS: Llama's layout with biases on queries, keys and values, and on the output if asked."""

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
    Row,
)

FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    gguf_architectures=("seed_oss",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=8),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads"), absent=128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 524288),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_out_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Activation(),
        Rope(10000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
    gguf=(
        Row("blk.{l}.post_attention_norm.weight", "layers.{l}.mlp_norm.weight"),
        *GGUF_DECODER,
    ),
)
