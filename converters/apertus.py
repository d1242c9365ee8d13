"""Apertus: Llama with norms of queries and keys, and an MLP without a gate, by xIELU.

xIELU has two numbers for each layer that are trained, and two that are not.
"""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_QK_NORMS,
    HF_XIELU,
    MEGATRON_XIELU,
    XIELU_WEIGHTS,
    Default,
    Family,
    Key,
    OneOf,
    Rope,
    Row,
)

FAMILY = Family(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    model_types=("apertus",),
    traits={"norm": "rmsnorm", "gated": False, "qk_norm": True},
    vocabulary=XIELU_WEIGHTS,
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 65536),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        OneOf("hidden_act", "activation", ("xielu",)),
        Rope(
            12000000.0,
            scaling={
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.attention_layernorm.weight", "layers.{l}.attn_norm.weight"),
        Row("model.layers.{l}.feedforward_layernorm.weight", "layers.{l}.mlp_norm.weight"),
        *HF_ATTENTION,
        *HF_QK_NORMS,
        *HF_GATED_MLP,
        *HF_XIELU,
    ),
    megatron=MEGATRON_XIELU,
    limits=((True, "Megatron has no xIELU activation"),),
)
