"""GLM-4 (0414), dense: norms before and after both branches, half of each head turns by pairs."""

from megtool.convert import (
    HF_ATTENTION,
    HF_FUSED_MLP,
    HF_MODEL,
    HF_NORMS,
    MEGATRON_POST_NORMS,
    POST_NORM_WEIGHTS,
    Activation,
    Family,
    Key,
    Rope,
    Row,
)

FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    traits={"norm": "rmsnorm", "gated": True, "rope_interleaved": True, "post_norms": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 2),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1.5625e-7),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", True),
        Activation(),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.5),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row("model.layers.{l}.post_self_attn_layernorm.weight", "layers.{l}.attn_post_norm.weight"),
        Row("model.layers.{l}.post_mlp_layernorm.weight", "layers.{l}.mlp_post_norm.weight"),
        *HF_FUSED_MLP,
    ),
    vocabulary=POST_NORM_WEIGHTS,
    megatron=MEGATRON_POST_NORMS,
    limits=((True, "Megatron has no norms after attention and MLP (Megatron-Bridge has)"),),
)
