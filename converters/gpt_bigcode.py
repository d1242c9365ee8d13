"""StarCoder and SantaCoder: GPT-2 with one head of keys and values, or as many as of queries."""

from megtool.convert import (
    Activation,
    Default,
    Derived,
    Dropped,
    Family,
    Grouped,
    Key,
    MultiQuery,
    Only,
    Row,
    UnscaledScores,
    with_bias,
)

_STORED, _OURS = "transformer.h.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."

FAMILY = Family(
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    model_types=("gpt_bigcode",),
    traits={
        "norm": "layernorm",
        "position_embedding": "learned",
        "gated": False,
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    config=(
        Key("n_layer", "num_layers"),
        Key("n_embd", "hidden_size"),
        Key("n_inner", "ffn_hidden_size", Default("4 * hidden_size")),
        Key("n_head", "num_heads"),
        MultiQuery(),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "max_positions", 1024),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Activation("activation_function", "gelu_pytorch_tanh"),
        UnscaledScores("scale_attn_weights"),
        Only("add_cross_attention", False),
    ),
    hf=(
        Row("transformer.wte.weight", "embed.weight"),
        Row("transformer.wpe.weight", "positions.weight"),
        *with_bias(_STORED + "ln_1", _OURS + "attn_norm"),
        Row(
            _STORED + "attn.c_attn.weight",
            Grouped(_ATTN + "q.weight", _ATTN + "k.weight", _ATTN + "v.weight", by="num_kv_heads"),
        ),
        Row(
            _STORED + "attn.c_attn.bias",
            Grouped(_ATTN + "q.bias", _ATTN + "k.bias", _ATTN + "v.bias", by="num_kv_heads"),
        ),
        *with_bias(_STORED + "attn.c_proj", _ATTN + "o"),
        *with_bias(_STORED + "ln_2", _OURS + "mlp_norm"),
        *with_bias(_STORED + "mlp.c_fc", _OURS + "mlp.up"),
        *with_bias(_STORED + "mlp.c_proj", _OURS + "mlp.down"),
        *with_bias("transformer.ln_f", "norm"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
    ),
)
