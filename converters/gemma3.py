"""Gemma 3, text: Gemma 2 with norms on queries and keys, and a rotary base for windows."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_QK_NORMS,
    Activation,
    Assumed,
    Default,
    Family,
    Key,
    Noted,
    Only,
    Rope,
    Row,
    Weight,
    Window,
)

FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    # Known, so as to be refused by name: GGUF files hold 1 + w of every norm, rounded.
    gguf_architectures=("gemma3",),
    traits={
        "norm": "rmsnorm",
        "zero_centered_norm": True,
        "gated": True,
        "qk_norm": True,
        "post_norms": True,
    },
    vocabulary={
        "layers.{l}.attn_post_norm.weight": Weight(("hidden_size",)),
        "layers.{l}.mlp_post_norm.weight": Weight(("hidden_size",)),
    },
    ignores={
        "attn_logit_softcapping": "attention passes it on to no scores",
        "_sliding_window_pattern": "layer_types says it",
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=4),
        Key("head_dim", "head_dim", 256),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Activation("hidden_activation", "gelu_pytorch_tanh"),
        Only("use_bidirectional_attention", False),
        Rope(1000000.0, local_key="rope_local_base_freq"),
        Window(default=4096, every=6, every_key="sliding_window_pattern"),
        Assumed("embedding_scale", "hidden_size ** 0.5"),
        # transformers reads attn_logit_softcapping, and does not use it.
        Noted("final_logit_softcapping", "logit_softcap", 0.0, "x + 0.0"),
        Noted("query_pre_attn_scalar", "softmax_scale", 256**-0.5, "x ** -0.5"),
    ),
    hf=(
        *HF_MODEL,
        Row("model.layers.{l}.input_layernorm.weight", "layers.{l}.attn_norm.weight"),
        Row("model.layers.{l}.post_attention_layernorm.weight", "layers.{l}.attn_post_norm.weight"),
        Row("model.layers.{l}.pre_feedforward_layernorm.weight", "layers.{l}.mlp_norm.weight"),
        Row(
            "model.layers.{l}.post_feedforward_layernorm.weight",
            "layers.{l}.mlp_post_norm.weight",
        ),
        *HF_ATTENTION,
        *HF_QK_NORMS,
        *HF_GATED_MLP,
    ),
    # As Megatron-Bridge calls them; Megatron itself has no norm there.
    megatron=(
        Row(
            "decoder.layers.{l}.self_attention.linear_proj.post_layernorm.weight",
            "layers.{l}.attn_post_norm.weight",
        ),
        Row(
            "decoder.layers.{l}.mlp.linear_fc2.post_layernorm.weight",
            "layers.{l}.mlp_post_norm.weight",
        ),
    ),
    limits=(
        (True, "Megatron does not multiply embeddings by sqrt(hidden_size) (Megatron-Bridge does)"),
        (True, "Megatron has no norms after attention and MLP (Megatron-Bridge has)"),
        (True, "query_pre_attn_scalar has to be set by hand in Megatron (softmax_scale)"),
    ),
)
