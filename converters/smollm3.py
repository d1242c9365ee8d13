"""SmolLM3: Llama's layout with layers that have no rotary embedding."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    NoRope,
    Rope,
    Window,
)

FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads"), absent=4),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Activation(),
        Rope(2000000.0),
        NoRope(),
        Window(switch="use_sliding_window", in_still_layers=True),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
)
