"""BLOOM: slopes of scores for positions (ALiBi), a norm of embeddings, and biases everywhere."""

from megtool.convert import (
    Derived,
    Dropped,
    EitherKey,
    Family,
    Grouped,
    Key,
    Only,
    Row,
    also_named,
    with_bias,
)

_STORED, _OURS = "transformer.h.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."

# The published checkpoints hold the bare model, whose names lack `transformer.`.
FAMILY = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_types=("bloom",),
    traits={
        "norm": "layernorm",
        "position_embedding": "alibi",
        "embedding_norm": True,
        "gated": False,
        "activation": "gelu_new",
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    config=(
        EitherKey(("n_layer", "num_hidden_layers"), "num_layers"),
        EitherKey(("hidden_size", "n_embed"), "hidden_size"),
        Derived("ffn_hidden_size", "4 * hidden_size"),
        EitherKey(("n_head", "num_attention_heads"), "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("seq_length", "max_positions", 2048),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Only("apply_residual_connection_post_layernorm", False),
    ),
    hf=(
        *also_named(
            (
                Row("transformer.word_embeddings.weight", "embed.weight"),
                *with_bias("transformer.word_embeddings_layernorm", "embed_norm"),
                *with_bias(_STORED + "input_layernorm", _OURS + "attn_norm"),
                Row(
                    _STORED + "self_attention.query_key_value.weight",
                    Grouped(
                        _ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight", by="num_heads"
                    ),
                ),
                Row(
                    _STORED + "self_attention.query_key_value.bias",
                    Grouped(_ATTN + "q.bias", _ATTN + "k.bias", _ATTN + "v.bias", by="num_heads"),
                ),
                *with_bias(_STORED + "self_attention.dense", _ATTN + "o"),
                *with_bias(_STORED + "post_attention_layernorm", _OURS + "mlp_norm"),
                *with_bias(_STORED + "mlp.dense_h_to_4h", _OURS + "mlp.up"),
                *with_bias(_STORED + "mlp.dense_4h_to_h", _OURS + "mlp.down"),
                *with_bias("transformer.ln_f", "norm"),
            ),
            "transformer.",
            "",
        ),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
    megatron=with_bias("embedding.norm", "embed_norm"),
    limits=((True, "Megatron normalizes embeddings in models of masked tokens alone"),),
)
