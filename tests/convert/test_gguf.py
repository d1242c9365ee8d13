"""What a GGUF file has to say, and what stands for what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.convert.gguf import config_from_gguf
from megtool.errors import MappingError
from tests.support.errors import raises

NEEDED: dict[str, Any] = {
    "attention.head_count": 8,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "context_length": 128,
    "vocab_size": 100,
}


def metadata(**more: Any) -> dict[str, Any]:
    keys = {f"llama.{key}": value for key, value in (NEEDED | more).items()}
    return {"general.architecture": "llama", **keys}


@pytest.mark.parametrize("key", [*NEEDED, "expert_used_count"])
def test_each_needed_key_is_missed_by_its_name(key: str) -> None:
    whole = metadata(expert_count=4, expert_used_count=2)
    assert config_from_gguf(whole, family("mixtral")).moe.num_experts == 4
    del whole[f"llama.{key}"]
    with raises(MappingError, f"lacks 'llama.{key}'"):
        config_from_gguf(whole, family("mixtral"))


def test_other_keys_have_defaults() -> None:
    config = config_from_gguf(metadata(), family("llama")).to_fields()
    defaults = {
        "num_kv_heads": 8,
        "head_dim": 8,
        "vocab_size": 100,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "rotary_percent": 1.0,
        "window_size": 0,
        "num_experts": 0,
        "tied_embeddings": False,
    }
    assert {name: config[name] for name in defaults} == defaults
