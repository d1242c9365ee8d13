"""MiniMax M2: Mixtral's experts by sigmoid scores, one norm over all queries, one over all keys."""

from megtool.convert import (
    HF_ATTENTION,
    HF_MODEL,
    HF_NORMS,
    HF_QK_NORMS,
    Activation,
    Assumed,
    Cat,
    Family,
    Key,
    Only,
    Rope,
    Row,
    ScoreNorm,
    Stacked,
)

FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    model_types=("minimax_m2",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "qk_norm_of": "all",
        "router_score": "sigmoid",
        "router_expert_bias": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "moe_ffn_hidden_size"),
        Assumed("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", 8),
        Key("head_dim", "head_dim", 128),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 196608),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Key("num_local_experts", "num_experts"),
        Key("num_experts_per_tok", "num_experts_per_token", 8),
        ScoreNorm(None),
        Only("use_qk_norm", True),
        Only("qk_norm_type", "per_layer"),
        Only("scoring_func", "sigmoid"),
        Only("shared_intermediate_size", 0),
        Activation(),
        Rope(5000000.0, percent_key="partial_rotary_factor", size_key="rotary_dim"),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_ATTENTION,
        *HF_QK_NORMS,
        Row(
            "model.layers.{l}.block_sparse_moe.gate.weight",
            "layers.{l}.mlp.router.weight",
            also=("model.layers.{l}.mlp.gate.weight",),
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.e_score_correction_bias",
            "layers.{l}.mlp.router.expert_bias",
            also=("model.layers.{l}.mlp.e_score_correction_bias",),
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight",
            "layers.{l}.mlp.experts.{e}.gate.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",
            "layers.{l}.mlp.experts.{e}.down.weight",
        ),
        Row(
            "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight",
            "layers.{l}.mlp.experts.{e}.up.weight",
        ),
        Row(
            "model.layers.{l}.mlp.experts.gate_up_proj",
            Stacked(
                Cat(
                    "layers.{l}.mlp.experts.{e}.gate.weight", "layers.{l}.mlp.experts.{e}.up.weight"
                ),
                "e",
            ),
        ),
        Row(
            "model.layers.{l}.mlp.experts.down_proj",
            Stacked("layers.{l}.mlp.experts.{e}.down.weight", "e"),
        ),
    ),
    limits=((True, "Megatron normalizes queries and keys head by head, not all heads at once"),),
)
