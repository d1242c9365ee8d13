"""CWM: Llama with sliding windows in three of four layers."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Family,
    Key,
    Only,
    Rope,
    Window,
)

FAMILY = Family(
    name="cwm",
    architectures=("CwmForCausalLM",),
    model_types=("cwm",),
    traits={"norm": "rmsnorm", "gated": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 8),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Activation(),
        Rope(
            1000000.0,
            scaling={
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        Window(default=8192, every=4, full_first=True),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
)
