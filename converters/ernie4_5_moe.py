"""ERNIE 4.5 with experts: softmax scores, and a bias that decides who is chosen alone."""

from megtool.convert import (
    HF_ATTENTION,
    HF_EXPERTS,
    HF_GATED_MLP,
    HF_MODEL,
    HF_NORMS,
    HF_SHARED_EXPERTS,
    Activation,
    Default,
    EitherKey,
    Family,
    Key,
    MoeSpan,
    Multiple,
    Only,
    Rope,
    Row,
    Unsqueezed,
    UpTo,
)

_NORM_MIN = "could be more than the sum of the scores that are divided by it"

FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    model_types=("ernie4_5_moe",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "rope_interleaved": True,
        "router_expert_bias": True,
        "router_fp32": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 4),
        Key("head_dim", "head_dim", Default("hidden_size // num_heads")),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 131072),
        Key("rms_norm_eps", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tied_embeddings", True),
        Only("use_bias", False),
        EitherKey(("moe_num_experts", "num_experts"), "num_experts"),
        EitherKey(("moe_k", "num_experts_per_tok"), "num_experts_per_token"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size"),
        Multiple(
            "moe_num_shared_experts", "shared_ffn_hidden_size", unit="moe_ffn_hidden_size", absent=2
        ),
        UpTo("moe_norm_min", "num_experts_per_token / num_experts", _NORM_MIN),
        MoeSpan("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        Activation(),
        Rope(500000.0),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        *HF_GATED_MLP,
        *HF_EXPERTS,
        *HF_SHARED_EXPERTS,
        Row(
            "model.layers.{l}.mlp.moe_statics.e_score_correction_bias",
            Unsqueezed("layers.{l}.mlp.router.expert_bias"),
            also=("model.layers.{l}.mlp.gate.moe_statics.e_score_correction_bias",),
        ),
    ),
    limits=((True, "Megatron adds an expert bias to sigmoid scores, not to a softmax"),),
)
