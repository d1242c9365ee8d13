"""DeepSeek-V4: compressed keys, residuals side by side, experts that a table chooses.

Tensors are called as DeepSeek publishes them; those of transformers' own saves are read as well.
"""

from megtool.convert import (
    HF_DEEPSEEK_V4,
    Activation,
    CompressRatios,
    CompressRope,
    Derived,
    Family,
    HashLayers,
    Key,
    Multiple,
    Noted,
    Only,
    ScoreNorm,
)

FAMILY = Family(
    name="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "attn_sinks": True,
        "router_score": "sqrtsoftplus",
        "router_expert_bias": True,
        "router_fp32": True,
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", 2048),
        Derived("ffn_hidden_size", "moe_ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Only("num_key_value_heads", 1),
        Derived("num_kv_heads", "1"),
        Key("head_dim", "head_dim", 512),
        Key("q_lora_rank", "q_lora_rank", 1024),
        Key("o_groups", "out_groups", 8),
        Key("o_lora_rank", "out_lora_rank", 1024),
        Key("sliding_window", "window_size", 128),
        CompressRatios(),
        Key("index_n_heads", "index_num_heads", 64),
        Key("index_head_dim", "index_head_dim", 128),
        Key("index_topk", "index_topk", 512),
        Key("hc_mult", "hyper_streams", 4),
        Key("hc_sinkhorn_iters", "hyper_iterations", 20),
        Noted("hc_eps", "hyper_eps", 1e-6),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 1048576),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Only("mlp_bias", False),
        Key("n_routed_experts", "num_experts", 256),
        Key("num_experts_per_tok", "num_experts_per_token", 6),
        Multiple(
            "n_shared_experts", "shared_ffn_hidden_size", unit="moe_ffn_hidden_size", absent=1
        ),
        HashLayers(),
        Key("routed_scaling_factor", "router_scaling", 1.5),
        Only("norm_topk_prob", True),
        ScoreNorm(None),
        Only("scoring_func", "sqrtsoftplus"),
        Only("topk_method", "noaux_tc"),
        Key("swiglu_limit", "activation_limit", 10.0),
        Key("num_nextn_predict_layers", "num_mtp_layers", 0),
        Activation(),
        CompressRope(),
    ),
    hf=HF_DEEPSEEK_V4,
    limits=(
        (
            True,
            "megatron-core up to 0.19 has no such attention, residuals or routing: tensors are "
            "called as in its development branch (0.20)",
        ),
    ),
)
