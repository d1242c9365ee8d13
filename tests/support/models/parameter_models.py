"""Models with every kind of parameter."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "layer norm": {
        "norm": "layernorm",
        "gated": False,
        "activation": "gelu",
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    },
    "qk norm": {"qk_norm": True},
    "experts": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": 8,
        "shared_ffn_hidden_size": 8,
        "moe_layer_freq": (0, 1, 0, 1),
    },
}
