"""Sizes of the models that `megtool quantize` is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import tiny_text
from tests.support.quant.loaded import randomize

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}

SMALL: dict[str, Any] = {"samples": 4, "seq_length": 32, "device": "cpu", "threads": 1}


def save_llama(folder: Path) -> Path:
    """A random Llama of two layers in bfloat16, with two heads of queries for each of keys, whose
    sizes groups and blocks of 128 divide."""
    tiny_text.save(
        folder,
        dtype="bfloat16",
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return randomize(folder)
