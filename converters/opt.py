"""OPT: learned positions behind two that are never used, biases everywhere, and ReLU.

OPT-350M, whose norms come after every addition and whose words are narrower than its layers, is
refused.
"""

from megtool.convert import (
    Activation,
    Default,
    Derived,
    Dropped,
    Family,
    Key,
    Only,
    Row,
    also_named,
    with_bias,
)

_STORED, _OURS = "model.decoder.layers.{l}.", "layers.{l}."

# Some published checkpoints hold the bare model, whose names lack `model.`.
FAMILY = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    model_types=("opt",),
    traits={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position_embedding": "learned",
        "position_offset": 2,
        "gated": False,
    },
    config=(
        Only("do_layer_norm_before", True),
        Only("_remove_final_layer_norm", False),
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Only("word_embed_proj_dim", Default("hidden_size")),
        Key("ffn_dim", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Derived("num_kv_heads", "num_heads"),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("layer_norm_elementwise_affine", "norm_weight", True),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("enable_bias", "qkv_bias", True),
        Key("enable_bias", "attn_out_bias", True),
        Key("enable_bias", "mlp_bias", True),
        Activation("activation_function", "relu"),
    ),
    hf=(
        *also_named(
            (
                Row("model.decoder.embed_tokens.weight", "embed.weight"),
                Row("model.decoder.embed_positions.weight", "positions.weight"),
                *with_bias(_STORED + "self_attn_layer_norm", _OURS + "attn_norm"),
                *with_bias(_STORED + "self_attn.q_proj", _OURS + "attn.q"),
                *with_bias(_STORED + "self_attn.k_proj", _OURS + "attn.k"),
                *with_bias(_STORED + "self_attn.v_proj", _OURS + "attn.v"),
                *with_bias(_STORED + "self_attn.out_proj", _OURS + "attn.o"),
                *with_bias(_STORED + "final_layer_norm", _OURS + "mlp_norm"),
                *with_bias(_STORED + "fc1", _OURS + "mlp.up"),
                *with_bias(_STORED + "fc2", _OURS + "mlp.down"),
                *with_bias("model.decoder.final_layer_norm", "norm"),
            ),
            "model.",
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
    limits=((True, "Megatron has no learned positions that are never used: the first two are"),),
)
