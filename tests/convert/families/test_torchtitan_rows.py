"""Names of torchtitan before 0.3 are told from Meta's own, which Mistral's folders have."""

from __future__ import annotations

import pytest

from megtool.convert.families.detection import family

OLD = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "output.weight"]
NEW = ["tok_embeddings.weight", "layers.0.attention.qkv_linear.wq.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "names", "found"),
    [("llama", OLD, True), ("llama", NEW, False), ("gemma", OLD, False), ("qwen3", OLD, True)],
)
def test_old_names(name: str, names: list[str], found: bool) -> None:
    assert family(name).has_torchtitan_names(names) is found
