"""StableLM: layer norms, a part of each head that turns, attention and MLP in parallel or not."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Derived,
    Family,
    Key,
    Rope,
    Row,
)

FAMILY = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    traits={"norm": "layernorm", "gated": True, "qk_norm_of": "each"},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 32),
        Derived("head_dim", "hidden_size // num_heads"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 4096),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("use_qkv_bias", "qkv_bias", False),
        Key("use_parallel_residual", "parallel_residual", False),
        Derived("shared_norm", "parallel_residual"),
        Key("qk_layernorm", "qk_norm", False),
        Activation(),
        Rope(10000.0, percent_key="partial_rotary_factor", percent=0.25),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        Row(
            "model.layers.{l}.self_attn.q_layernorm.norms.{h}.weight",
            "layers.{l}.attn.q_norms.{h}.weight",
        ),
        Row(
            "model.layers.{l}.self_attn.k_layernorm.norms.{g}.weight",
            "layers.{l}.attn.k_norms.{g}.weight",
        ),
        *HF_GATED_MLP,
    ),
    limits=(
        ("shared_norm", "Megatron has no norm that feeds attention and MLP at once"),
        ("qk_norm", "Megatron has one norm for all heads of queries and keys, not one for each"),
    ),
)
