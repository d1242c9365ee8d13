"""OLMo: Llama with layer norms that have neither weight nor bias."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    Activation,
    Default,
    Derived,
    Family,
    Key,
    Noted,
    Rope,
)

FAMILY = Family(
    name="olmo",
    architectures=("OlmoForCausalLM",),
    model_types=("olmo",),
    traits={"norm": "layernorm", "norm_weight": False, "norm_bias": False, "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Derived("norm_eps", "0.00001"),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Noted("clip_qkv", "qkv_clip", 0.0),
        Activation(),
        Rope(10000.0),
    ),
    hf=(*HF_MODEL, *HF_ATTENTION, *HF_GATED_MLP),
    limits=((True, "Megatron's norms have weights"),),
)
