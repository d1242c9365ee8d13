"""Models whose training state is resharded."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied_embeddings": True},
    "biased": {
        "norm": "layernorm",
        "gated": False,
        "activation": "gelu",
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    "qk norm": {"qk_norm": True},
    "experts": {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8},
    "some experts": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
        "shared_ffn_hidden_size": 8,
        "moe_layer_freq": (0, 1, 0, 1),
    },
    "latent attention, a layer that predicts further, experts": {
        "num_kv_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "head_dim": 8,
        "v_head_dim": 4,
        "qk_norm": True,
        "num_mtp_layers": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
        "shared_ffn_hidden_size": 8,
        "router_expert_bias": True,
        "router_score": "sigmoid",
        "moe_layer_freq": (0, 1, 1, 1),
    },
    "mamba": {
        "layer_kinds": ("M", "E", "*", "-"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_state_dim": 4,
        "mamba_num_groups": 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
        "moe_latent_size": 8,
        "position_embedding": "none",
    },
    "delta net": {
        "layer_kinds": ("G-", "GE", "*-", "GE"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
        "zero_centered_norm": True,
        "attn_output_gate": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
    },
}
