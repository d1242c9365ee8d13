"""GPT-2: learned positions, biases everywhere, and linear layers stored transposed."""

from megtool.convert import (
    Activation,
    Cat,
    Default,
    Derived,
    Dropped,
    Family,
    Key,
    Only,
    Row,
    Transposed,
    UnscaledScores,
)

# The published checkpoints hold the bare model, whose names lack `transformer.`.
FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
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
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "max_positions", 1024),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Activation("activation_function", "gelu_new"),
        UnscaledScores("scale_attn_weights"),
        Key("scale_attn_by_inverse_layer_idx", "attn_scale_by_layer", False),
        Only("add_cross_attention", False),
    ),
    hf=(
        Row("transformer.wte.weight", "embed.weight", also=("wte.weight",)),
        Row("transformer.wpe.weight", "positions.weight", also=("wpe.weight",)),
        Row(
            "transformer.h.{l}.ln_1.weight",
            "layers.{l}.attn_norm.weight",
            also=("h.{l}.ln_1.weight",),
        ),
        Row("transformer.h.{l}.ln_1.bias", "layers.{l}.attn_norm.bias", also=("h.{l}.ln_1.bias",)),
        Row(
            "transformer.h.{l}.attn.c_attn.weight",
            Transposed(
                Cat(
                    "layers.{l}.attn.q.weight",
                    "layers.{l}.attn.k.weight",
                    "layers.{l}.attn.v.weight",
                )
            ),
            also=("h.{l}.attn.c_attn.weight",),
        ),
        Row(
            "transformer.h.{l}.attn.c_attn.bias",
            Cat("layers.{l}.attn.q.bias", "layers.{l}.attn.k.bias", "layers.{l}.attn.v.bias"),
            also=("h.{l}.attn.c_attn.bias",),
        ),
        Row(
            "transformer.h.{l}.attn.c_proj.weight",
            Transposed("layers.{l}.attn.o.weight"),
            also=("h.{l}.attn.c_proj.weight",),
        ),
        Row(
            "transformer.h.{l}.attn.c_proj.bias",
            "layers.{l}.attn.o.bias",
            also=("h.{l}.attn.c_proj.bias",),
        ),
        Row(
            "transformer.h.{l}.ln_2.weight",
            "layers.{l}.mlp_norm.weight",
            also=("h.{l}.ln_2.weight",),
        ),
        Row("transformer.h.{l}.ln_2.bias", "layers.{l}.mlp_norm.bias", also=("h.{l}.ln_2.bias",)),
        Row(
            "transformer.h.{l}.mlp.c_fc.weight",
            Transposed("layers.{l}.mlp.up.weight"),
            also=("h.{l}.mlp.c_fc.weight",),
        ),
        Row(
            "transformer.h.{l}.mlp.c_fc.bias",
            "layers.{l}.mlp.up.bias",
            also=("h.{l}.mlp.c_fc.bias",),
        ),
        Row(
            "transformer.h.{l}.mlp.c_proj.weight",
            Transposed("layers.{l}.mlp.down.weight"),
            also=("h.{l}.mlp.c_proj.weight",),
        ),
        Row(
            "transformer.h.{l}.mlp.c_proj.bias",
            "layers.{l}.mlp.down.bias",
            also=("h.{l}.mlp.c_proj.bias",),
        ),
        Row("transformer.ln_f.weight", "norm.weight", also=("ln_f.weight",)),
        Row("transformer.ln_f.bias", "norm.bias", also=("ln_f.bias",)),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
        Dropped("*h.*.attn.bias", "the causal mask"),
        Dropped("*h.*.attn.masked_bias", "the causal mask's value"),
    ),
)
