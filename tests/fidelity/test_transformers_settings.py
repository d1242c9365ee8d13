"""A changed config.json: where transformers' logits move, ours follow, or the change is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool.convert.families.detection import detect_family
from tests.support.fidelity.hf_changes import Change, list_changes
from tests.support.fidelity.hf_pairs import (
    NOT_RUN,
    Pair,
    Verdict,
    judge,
    nested_changes,
    pair_names,
    pair_of,
)

FAST = ("llama", "qwen2", "gemma3", "gpt_oss", "deepseek_v3", "llama4")
"""Families of which one value of every setting is tried each time."""
SIZES = re.compile(r"(.*_size|.*_dim|.*_rank|num_(hidden_)?(layers|.*heads)|.*experts)(_.*)?")

ELSEWHERE = {
    "tie_word_embeddings": "a stored head that a setting calls tied is compared by its bytes",
}
"""Changes that are judged by other tests, and why."""
NOT_FOLLOWED = {
    ("phimoe", "rope_parameters={'rope_type': 'longrope'"): "transformers 5 takes the short "
    "factors at any length; the published code and engines take the long ones for long texts",
}
"""Changes of families in which transformers is not followed, and why."""


def one_value_each(pair: Pair) -> Iterator[Change]:
    """Yield one change of each setting that is read, but for sizes, which shapes tell."""
    keys = {k for k in detect_family(pair.stored).stored_keys if not SIZES.fullmatch(k)}
    for change in list_changes(pair.stored):
        key = change.key.partition(" ")[0]
        if key in keys:
            keys.remove(key)
            yield change


def wrong(name: str, verdicts: Iterator[Verdict]) -> list[Verdict]:
    """Return the verdicts that are wrong, of several."""
    found, left = list(verdicts), (*ELSEWHERE, *(c for n, c in NOT_FOLLOWED if n == name))
    assert sum(v.kind in ("follows", "refused", "ignored") for v in found) > 5
    return [v for v in found if v.is_wrong and not v.change.startswith(left)]


@pytest.mark.parametrize("name", FAST)
def test_one_value_of_every_setting(name: str, tmp_path: Path) -> None:
    pair = pair_of(name)
    assert wrong(name, judge(pair, one_value_each(pair), tmp_path / "model")) == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3_vl_moe", "norm_topk_prob", False),
        ("gemma3_multimodal", "final_logit_softcapping", 4.0),
        ("deepseek_v32", "mlp_bias", True),
    ],
)
def test_a_key_that_the_class_ignores_acts_on_nothing(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    pair = pair_of(name)
    text = (pair.stored["text_config"] if pair.nested else pair.stored) | {key: value}
    stored = {**pair.stored, "text_config": text} if pair.nested else text
    found = judge(pair, [Change(key, str(value), stored)], tmp_path / "model")
    assert [v.kind for v in found] == ["follows", "ignored"]


def test_a_masked_head_has_the_activation_of_its_class(tmp_path: Path) -> None:
    """RoBERTa's is GELU, whatever MLPs have."""
    pair = pair_of("roberta")
    stored = {**pair.stored, "hidden_act": "relu"}
    found = judge(pair, [Change("hidden_act", "relu", stored)], tmp_path / "model")
    assert [v.kind for v in found] == ["follows", "follows"]


@pytest.mark.slow
@pytest.mark.parametrize("name", pair_names())
def test_every_value_of_every_setting(name: str, tmp_path: Path) -> None:
    if name in NOT_RUN:
        pytest.skip(NOT_RUN[name])
    pair = pair_of(name)
    changes = nested_changes(pair) if pair.nested else list_changes(pair.stored)
    assert wrong(name, judge(pair, changes, tmp_path / "model")) == []
