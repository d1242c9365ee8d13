"""transformers' default configuration of each family, and which of its keys are looked at."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import family, family_names

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SAID: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Keys without which transformers' own configuration is that of no model we know."""

CASES = [
    (name, kind)
    for name in family_names()
    for kind in family(name).model_types
    if kind in CONFIG_MAPPING
]


class Seen(dict[str, Any]):
    """Keys and values that notes which are looked at."""

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__(stored)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)


def whole_config(name: str, kind: str) -> dict[str, Any]:
    """transformers' default of the family, with fewer heads of keys than of queries."""
    keys = dict(SAID.get(name, {}))
    made = CONFIG_MAPPING[kind](**keys)
    heads = getattr(made, "num_attention_heads", None)
    if heads is not None and getattr(made, "num_key_value_heads", 0) in (None, heads):
        made = CONFIG_MAPPING[kind](**keys, num_key_value_heads=heads // 2)
    whole: dict[str, Any] = made.to_dict()
    return whole
