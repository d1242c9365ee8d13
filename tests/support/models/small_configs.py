"""Sizes of small models, and their configurations."""

from __future__ import annotations

from typing import Any

from megtool.spec.model_config import ModelConfig

SIZES = dict(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
)
EXPERTS = dict(num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=16)


def config(**fields: Any) -> ModelConfig:
    """Make the configuration of a small model with these fields."""
    return ModelConfig.from_fields(**SIZES | fields)
