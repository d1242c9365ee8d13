"""MiMo-7B: Qwen2's layout; multi-token prediction, which reads the hidden state before the word."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    Activation,
    Default,
    Family,
    Key,
    Only,
    Rope,
    Window,
    hf_mtp,
)

_LAYERS = (*HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP)
_MTP = hf_mtp(
    _LAYERS,
    layer="model.mtp_layers.{m}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    proj="input_proj",
    norm="final_layernorm",
    hidden_first=True,
)

FAMILY = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    model_types=("mimo",),
    traits={"norm": "rmsnorm", "gated": True, "qkv_bias": True, "mtp_hidden_first": True},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 32768),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", True),
        Activation(),
        Rope(640000.0),
        Window(switch="use_sliding_window", first_key="max_window_layers"),
        Key("num_nextn_predict_layers", "num_mtp_layers", 0),
    ),
    hf=(*HF_MODEL, *_LAYERS, *_MTP),
)
