"""Llama-Nemotron (51B, Super 49B, Ultra 253B): Llama with layers of unequal sizes."""

from megtool.convert import (
    HF_ATTENTION,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    BlockConfigs,
    Default,
    Family,
    Key,
    Only,
    Rope,
)

FAMILY = Family(
    name="nemotron_nas",
    architectures=("DeciLMForCausalLM",),
    model_types=("nemotron-nas",),
    traits={"norm": "rmsnorm", "gated": True, "activation": "silu"},
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("num_attention_heads", "num_heads"),
        BlockConfigs(),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Only("hidden_act", "silu"),
        Rope(10000.0),
    ),
    hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP),
)
