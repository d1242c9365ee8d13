"""Phi-1 to 2: one layer norm feeds attention and MLP, which are in parallel; biases everywhere."""

from megtool.convert import (
    Activation,
    Default,
    Dropped,
    Family,
    Key,
    Padded,
    Rope,
    Row,
    Weight,
    with_bias,
)

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."

FAMILY = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    traits={
        "norm": "layernorm",
        "gated": False,
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "parallel_residual": True,
        "shared_norm": True,
    },
    vocabulary={"head.bias": Weight(("vocab_size",))},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("qk_layernorm", "qk_norm", False),
        Activation("hidden_act", "gelu_new"),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.5),
    ),
    hf=(
        Row("model.embed_tokens.weight", "embed.weight"),
        Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
        Row("lm_head.bias", "head.bias"),
        Dropped(
            "lm_head.weight",
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        ),
        *with_bias(_STORED + "input_layernorm", _OURS + "attn_norm"),
        *with_bias(_STORED + "self_attn.q_proj", _OURS + "attn.q"),
        *with_bias(_STORED + "self_attn.k_proj", _OURS + "attn.k"),
        *with_bias(_STORED + "self_attn.v_proj", _OURS + "attn.v"),
        *with_bias(_STORED + "self_attn.q_layernorm", _OURS + "attn.q_norm"),
        *with_bias(_STORED + "self_attn.k_layernorm", _OURS + "attn.k_norm"),
        *with_bias(_STORED + "self_attn.dense", _OURS + "attn.o"),
        *with_bias(_STORED + "mlp.fc1", _OURS + "mlp.up"),
        *with_bias(_STORED + "mlp.fc2", _OURS + "mlp.down"),
        *with_bias("model.final_layernorm", "norm"),
    ),
    megatron=(Row("output_layer.bias", Padded("head.bias")),),
    limits=(
        (True, "Megatron has no norm that feeds attention and MLP at once"),
        (True, "Megatron's output layer has no bias"),
    ),
)
