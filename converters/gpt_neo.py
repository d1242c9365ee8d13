"""GPT-Neo: learned positions, windows in every other layer, and scores that are not scaled."""

from megtool.convert import (
    Activation,
    Default,
    Derived,
    Dropped,
    Family,
    Key,
    LocalLayers,
    Row,
    with_bias,
)

_STORED, _OURS = "transformer.h.{l}.", "layers.{l}."
_ATTN = _OURS + "attn."

FAMILY = Family(
    name="gpt_neo",
    architectures=("GPTNeoForCausalLM",),
    model_types=("gpt_neo",),
    traits={
        "norm": "layernorm",
        "position_embedding": "learned",
        "gated": False,
        "attn_out_bias": True,
        "mlp_bias": True,
        "softmax_scale": 1.0,
    },
    config=(
        Key("num_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size", Default("4 * hidden_size")),
        Key("num_heads", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Activation("activation_function", "gelu_new"),
        LocalLayers(),
    ),
    hf=(
        Row("transformer.wte.weight", "embed.weight"),
        Row("transformer.wpe.weight", "positions.weight"),
        *with_bias(_STORED + "ln_1", _OURS + "attn_norm"),
        Row(_STORED + "attn.attention.q_proj.weight", _ATTN + "q.weight"),
        Row(_STORED + "attn.attention.k_proj.weight", _ATTN + "k.weight"),
        Row(_STORED + "attn.attention.v_proj.weight", _ATTN + "v.weight"),
        *with_bias(_STORED + "attn.attention.out_proj", _ATTN + "o"),
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
        Dropped("*.attn.attention.bias", "the causal mask"),
        Dropped("*.attn.attention.masked_bias", "the causal mask's value"),
    ),
    limits=((True, "scores are not scaled: softmax_scale has to be set by hand in Megatron"),),
)
