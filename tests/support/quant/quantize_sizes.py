"""Sizes of the models that `megtool quantize` is tested with."""

from __future__ import annotations

from typing import Any

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}

SMALL: dict[str, Any] = {"samples": 4, "seq_length": 32, "device": "cpu", "threads": 1}
