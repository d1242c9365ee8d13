"""nanochat: norms without weights, also of the embeddings, and heads that turn the other way."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    Activation,
    Default,
    Family,
    Key,
    Noted,
    Rope,
    Row,
)

FAMILY = Family(
    name="nanochat",
    architectures=("NanoChatForCausalLM",),
    model_types=("nanochat",),
    traits={
        "norm": "rmsnorm",
        "norm_weight": False,
        "embedding_norm": True,
        "gated": False,
        "qk_l2_norm": True,
        "rope_reversed": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attn_out_bias", False),
        Activation("hidden_act", "relu2"),
        Rope(10000.0),
        Noted("final_logit_softcapping", "logit_softcap", 15.0, "x + 0.0", null=0.0),
    ),
    hf=(
        *HF_MODEL,
        *HF_ATTENTION,
        Row("model.layers.{l}.mlp.fc1.weight", "layers.{l}.mlp.up.weight"),
        Row("model.layers.{l}.mlp.fc2.weight", "layers.{l}.mlp.down.weight"),
    ),
    limits=(
        (True, "Megatron's norms have weights, and none is of the embeddings"),
        (True, "Megatron turns heads the other way, and has no soft cap of logits"),
    ),
)
