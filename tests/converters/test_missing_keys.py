"""A key that a config.json lacks, or says null for, means what transformers takes it to mean."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import detect_family, family, family_names
from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.fidelity.whole_configs import CASES, Seen, whole_config

NOT_THERE = {"bailing_moe_v2", "mimo", "nemotron_nas", "openelm"}
"""Families that transformers has no configuration for."""

BESIDE = {
    "num_mtp_layers": "tensors say it, and transformers has none of them",
    "extra": "what is kept verbatim",
}
"""Fields that are not compared, and why."""

UNLIKE = {
    ("llama", "model_type"): "without it the class says whether it is a Mistral",
    ("kimi_k25", "tie_word_embeddings"): "the inner settings have it in published files",
    ("mistral3", "tie_word_embeddings"): "the inner settings have it in published files",
    ("qwen3_vl_moe", "tie_word_embeddings"): "the inner settings have it in published files",
}
"""Keys of families that are not read as transformers reads them, and why."""


def comparable(config: ModelConfig) -> dict[str, Any]:
    """Fields, with no groups of experts where there is one."""
    found = {name: x for name, x in config.to_fields().items() if name not in BESIDE}
    groups = ("router_num_groups", "router_topk_groups")
    return found | {n: found[n] if found["router_num_groups"] > 1 else 0 for n in groups}


def difference(read: Family, kind: str, stored: dict[str, Any], key: str) -> str | None:
    """Return how our reading differs from that of what transformers makes of the keys."""
    try:
        completed = CONFIG_MAPPING[kind].from_dict(dict(stored)).to_dict()
    except Exception:  # transformers refuses it, with any error
        return None
    sizes = [completed.get(n) for n in ("hidden_size", "num_attention_heads")]
    if all(sizes) and completed.get("head_dim", 0) is None:  # its attention completes it so
        completed["head_dim"] = sizes[0] // sizes[1]
    try:
        ours = comparable(read.read_config(stored))
    except MappingError as error:
        # To refuse what is missing, by its name, is as good, and so is to refuse a null.
        named = key in error.message or "the configuration lacks" in error.message
        return None if named or key in stored else f"refused for another reason: {error.message}"
    try:
        theirs = comparable(read.read_config(completed))
    except MappingError as error:
        return f"transformers takes it to mean what is refused: {error.message}"
    wrong = {n: (ours[n], theirs[n]) for n in ours if ours[n] != theirs[n]}
    return str(wrong) if wrong else None


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_missing_keys_are_read_as_by_transformers(name: str, kind: str) -> None:
    whole = whole_config(name, kind) | {"architectures": [family(name).architectures[0]]}
    read = detect_family(whole)
    assert read.name == name
    seen = Seen(whole)
    read.read_config(seen)
    wrong = {}
    for key in sorted(seen.names & whole.keys()):
        rest = {k: v for k, v in whole.items() if k != key}
        ways = {f"{key} is absent": rest}
        if whole[key] is not None:
            ways[f"{key} is null"] = rest | {key: None}
        for way, stored in ways.items():
            said = difference(read, kind, stored, key)
            if said is not None and (name, key) not in UNLIKE:
                wrong[way] = said
    assert wrong == {}


def test_every_family_is_compared() -> None:
    assert {name for name, _ in CASES} == set(family_names()) - NOT_THERE
