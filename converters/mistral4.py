"""Mistral 4, text: DeepSeek's layers with softmax routing and queries scaled by their position.

Mistral Large 3 is one, and ships under Mistral's own names, with a vision tower that is carried.
"""

from megtool.convert import (
    HF_EXPERTS,
    HF_GATED_MLP,
    HF_LATENT_ATTENTION,
    HF_MISTRAL_LARGE_3,
    HF_MODEL,
    HF_NORMS,
    HF_SHARED_EXPERTS,
    HF_STACKED_EXPERTS,
    Activation,
    Default,
    Derived,
    Family,
    Key,
    MoeLayers,
    Multiple,
    Nullable,
    Only,
    Refused,
    Rope,
    RopeTemperature,
    Tower,
)

_TOWERS = (
    Tower("vision_encoder.", is_required=False),
    Tower("vision_language_adapter.", is_required=False),
    Tower("patch_merger.", is_required=False),
)

FAMILY = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM",),
    model_types=("mistral4",),
    traits={
        "norm": "rmsnorm",
        "gated": True,
        "qk_norm": True,
        "attn_temperature_rotated": True,
        "latent_norm_eps": 1e-6,
    },
    ignores={
        "qk_head_dim": "the sizes of its parts say it",
        "head_dim": "the sizes of its parts say it",
    },
    config=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_heads"),
        Key("num_key_value_heads", "num_kv_heads", Default("num_heads")),
        Nullable("q_lora_rank", "q_lora_rank", absent=1024),
        Key("kv_lora_rank", "kv_lora_rank", 256),
        Key("qk_nope_head_dim", "qk_nope_head_dim", 64),
        Key("qk_rope_head_dim", "qk_rope_head_dim", 64),
        Key("v_head_dim", "v_head_dim", 128),
        Derived("head_dim", "qk_nope_head_dim + qk_rope_head_dim"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_positions", 1048576),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("tie_word_embeddings", "tied_embeddings", False),
        Only("attention_bias", False),
        Key("n_routed_experts", "num_experts", 128),
        Key("num_experts_per_tok", "num_experts_per_token", 4),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", 2048),
        Multiple(
            "n_shared_experts", "shared_ffn_hidden_size", unit="moe_ffn_hidden_size", absent=1
        ),
        MoeLayers(first="first_k_dense_replace"),
        # Of a softmax over groups, Megatron would rank logits.
        Only("n_group", 1),
        Only("topk_group", 1),
        Key("routed_scaling_factor", "router_scaling", 1.0),
        Only("norm_topk_prob", True),
        Activation(),
        Refused("rope_interleave", False, "Megatron's latent attention rotates pairs"),
        Rope(
            10000.0,
            old=False,
            scaling={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "max_position_embeddings": Default("max_positions"),
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        RopeTemperature(),
    ),
    hf=(
        *HF_MODEL,
        *HF_NORMS,
        *HF_LATENT_ATTENTION,
        *HF_GATED_MLP,
        *HF_STACKED_EXPERTS,
        *HF_EXPERTS,
        *HF_SHARED_EXPERTS,
        *HF_MISTRAL_LARGE_3,
        *_TOWERS,
    ),
    megatron=_TOWERS,
    limits=(
        (
            "attn_temperature_scale",
            "Megatron does not scale queries by their position, beyond the length that the model "
            "was first trained for",
        ),
    ),
)
