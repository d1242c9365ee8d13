"""GPT-J: one layer norm feeds attention and MLP, in parallel; pairs of neighbours turn."""

from megtool.convert import (
    Activation,
    Default,
    Derived,
    Dropped,
    Family,
    FixedRope,
    Key,
    Padded,
    Row,
    Weight,
    with_bias,
)

_STORED, _OURS = "transformer.h.{l}.", "layers.{l}."

FAMILY = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    model_types=("gptj",),
    traits={
        "norm": "layernorm",
        "gated": False,
        "mlp_bias": True,
        "head_bias": True,
        "parallel_residual": True,
        "shared_norm": True,
        "rope_interleaved": True,
    },
    vocabulary={"head.bias": Weight(("vocab_size",))},
    config=(
        Key("n_layer", "num_layers"),
        Key("n_embd", "hidden_size"),
        Key("n_inner", "ffn_hidden_size", Default("4 * hidden_size")),
        Key("n_head", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "max_positions", 2048),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Activation("activation_function", "gelu_new"),
        FixedRope("rotary_dim", 64),
    ),
    hf=(
        Row("transformer.wte.weight", "embed.weight"),
        *with_bias(_STORED + "ln_1", _OURS + "attn_norm"),
        Row(_STORED + "attn.q_proj.weight", _OURS + "attn.q.weight"),
        Row(_STORED + "attn.k_proj.weight", _OURS + "attn.k.weight"),
        Row(_STORED + "attn.v_proj.weight", _OURS + "attn.v.weight"),
        Row(_STORED + "attn.out_proj.weight", _OURS + "attn.o.weight"),
        *with_bias(_STORED + "mlp.fc_in", _OURS + "mlp.up"),
        *with_bias(_STORED + "mlp.fc_out", _OURS + "mlp.down"),
        *with_bias("transformer.ln_f", "norm"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Row("lm_head.bias", "head.bias"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
        Dropped("*.attn.bias", "the causal mask"),
        Dropped("*.attn.masked_bias", "the causal mask's value"),
    ),
    megatron=(Row("output_layer.bias", Padded("head.bias")),),
    limits=(
        (True, "Megatron has no norm that feeds attention and MLP at once"),
        (True, "Megatron's output layer has no bias"),
    ),
)
