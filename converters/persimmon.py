"""Persimmon: layer norms, also of queries and keys, with biases everywhere; squared ReLU."""

from megtool.convert import (
    HF_NORMS,
    Activation,
    Derived,
    Dropped,
    Family,
    Grouped,
    Key,
    Rope,
    Row,
    with_bias,
)

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."

FAMILY = Family(
    name="persimmon",
    architectures=("PersimmonForCausalLM",),
    model_types=("persimmon",),
    traits={
        "norm": "layernorm",
        "gated": False,
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 16384),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("qk_layernorm", "qk_norm", True),
        Activation("hidden_act", "relu2"),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.5),
    ),
    hf=(
        Row("model.embed_tokens.weight", "embed.weight"),
        *HF_NORMS,
        Row(
            _STORED + "self_attn.query_key_value.weight",
            Grouped(_ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight", by="num_heads"),
        ),
        Row(
            _STORED + "self_attn.query_key_value.bias",
            Grouped(_ATTN + "q.bias", _ATTN + "k.bias", _ATTN + "v.bias", by="num_heads"),
        ),
        *with_bias(_STORED + "self_attn.q_layernorm", _ATTN + "q_norm"),
        *with_bias(_STORED + "self_attn.k_layernorm", _ATTN + "k_norm"),
        *with_bias(_STORED + "self_attn.dense", _ATTN + "o"),
        *with_bias(_STORED + "mlp.dense_h_to_4h", _OURS + "mlp.up"),
        *with_bias(_STORED + "mlp.dense_4h_to_h", _OURS + "mlp.down"),
        *with_bias("model.final_layernorm", "norm"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
)
