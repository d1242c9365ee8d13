"""Hunyuan, dense: Llama with norms of queries and keys that come after their rotation."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_HUNYUAN_QK_NORMS,
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
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "qk_norm_rotated": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Only("use_qk_norm", True),
        Only("use_cla", False),
        Activation(),
        Rope(10000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_HUNYUAN_QK_NORMS, *HF_GATED_MLP),
    limits=((True, "Megatron normalizes queries and keys before their rotation, not after it"),),
)
