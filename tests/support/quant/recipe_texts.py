"""Recipes in the dialects of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.quant.recipes.dialects import parse_recipe
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.recipe import Recipe

TE = "transformer_engine_config_type"


def megatron(*matchers: tuple[str, str, bool | None]) -> dict[str, Any]:
    """Megatron's recipe with a matcher for each (pattern, config, enabled)."""
    out: dict[str, Any] = {}
    for number, (pattern, config, enabled) in enumerate(matchers):
        out[f"m{number}"] = {"type": "glob", "pattern": pattern, "config": config}
        if enabled is not None:
            out[f"m{number}"]["enabled"] = enabled
    training = {"mxfp8": {"fp8_quantization_recipe": "mxfp8"}, "bf16": {}}
    training["nvfp4"] = {"fp4_quantization_recipe": "nvfp4"}
    configs = {k: {TE: "TEQuantizationParams", "training_recipe": v} for k, v in training.items()}
    return {"configs": configs, "matchers": out}


MEGATRON = megatron(
    ("*layers.1*", "bf16", None),
    ("*.layers.0.*", "bf16", True),
    ("*linear_qkv", "nvfp4", True),
    ("*experts*", "nvfp4", True),
    ("*", "mxfp8", True),
)

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "rest": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
        },
        "mlps": {
            "targets": ["re:.*mlp.*(gate|up|down)_proj"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        },
        "one": {
            "targets": ["model.layers.3.mlp.down_proj"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        },
    },
    "ignore": ["lm_head", r"re:model\.layers\.0\.", "re:.*mlp.gate$"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}

OFF = {"quantizer_name": "*", "enable": False}

FP8 = {"num_bits": (4, 3), "axis": None}


def both(pattern: str, cfg: Any) -> list[dict[str, Any]]:
    return [{"quantizer_name": f"{pattern}{p}_quantizer", "cfg": cfg} for p in ("weight", "input")]


def from_plain(value: Any) -> Node:
    """Convert plain data to nodes without line numbers (0)."""
    if isinstance(value, dict):
        values = {str(key): from_plain(item) for key, item in value.items()}
        return Node(value=values, line=0, keys=dict.fromkeys(values, 0))
    if isinstance(value, list | tuple):
        return Node(value=[from_plain(item) for item in value], line=0)
    return Node(value=value, line=0)


def recipe_from(data: Mapping[str, Any], *, name: str = "given") -> Recipe:
    """Read a recipe in any dialect from plain data."""
    return parse_recipe(from_plain(dict(data)), name=name, file=name)
