"""Command R: one layer norm without a bias feeds attention and MLP, which are in parallel."""

from megtool.convert import (
    GGUF_WITHOUT_QK_NORMS,
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    Activation,
    Default,
    Family,
    Key,
    Noted,
    Rope,
    Row,
    Stacked,
)

FAMILY = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    gguf_architectures=("command-r",),
    traits={
        "norm": "layernorm",
        "norm_bias": False,
        "shared_norm": True,
        "parallel_residual": True,
        "gated": True,
        "rope_interleaved": True,
        "qk_norm_of": "each",
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 8192),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("use_qk_norm", "qk_norm", False),
        Activation(),
        Rope(500000.0),
        Noted("logit_scale", "logit_scale", 0.0625),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        *HF_ATTENTION,
        Row(
            "model.layers.{l}.self_attn.q_norm.weight",
            Stacked("layers.{l}.attn.q_norms.{h}.weight", "h"),
        ),
        Row(
            "model.layers.{l}.self_attn.k_norm.weight",
            Stacked("layers.{l}.attn.k_norms.{g}.weight", "g"),
        ),
        *HF_GATED_MLP,
    ),
    gguf=(
        *GGUF_WITHOUT_QK_NORMS,
        Row("blk.{l}.attn_q_norm.weight", Stacked("layers.{l}.attn.q_norms.{h}.weight", "h")),
        Row("blk.{l}.attn_k_norm.weight", Stacked("layers.{l}.attn.k_norms.{g}.weight", "g")),
    ),
    limits=(
        (True, "Megatron's layer norms have a bias, and none feeds attention and MLP at once"),
        (True, "Megatron has no multiplier of logits"),
        ("qk_norm", "Megatron has one norm for all heads of queries and keys, not one for each"),
    ),
)
