"""What is written is read back: a setting that would be lost is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.convert.families.read_back import (
    check_read_back,
    fields_called,
    find_holders,
    without_keys,
    without_settings,
)
from megtool.errors import MappingError, UsageError
from megtool.spec.model_config import ModelConfig
from tests.spec.test_meaning import EXPERTS, SIZES


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.from_fields(**SIZES | fields)


def test_a_setting_that_the_family_does_not_write() -> None:
    llama, model = family("llama"), config(softmax_scale=0.1)
    with pytest.raises(MappingError) as caught:
        check_read_back(model, llama, llama.write_config(model))
    assert caught.value.id == "setting-lost"
    assert "softmax_scale" in caught.value.message
    assert "0.1" in caught.value.message
    assert "--drop-setting softmax_scale" in str(caught.value.hint)


def test_a_key_that_a_table_has_forgotten() -> None:
    qwen = family("qwen3_moe")
    model = config(**EXPERTS, qk_norm=True)
    check_read_back(model, qwen, qwen.write_config(model))
    forgotten = tuple(s for s in qwen.config if getattr(s, "key", "") != "norm_topk_prob")
    careless = replace(qwen, config=forgotten)
    with pytest.raises(MappingError, match="router_pre_softmax"):
        check_read_back(model, qwen, careless.write_config(model))


def test_who_holds_a_setting() -> None:
    assert "qwen3" in find_holders(config(qk_norm=True))
    assert "llama" not in find_holders(config(qk_norm=True))


def test_names_of_settings() -> None:
    assert fields_called("softmax_scale") == ("softmax_scale",)
    assert fields_called("--window-size") == ("window_size",)
    assert fields_called("layernorm_zero_centered_gamma") == ("zero_centered_norm",)
    assert fields_called("sliding_window") == ("window_size",)
    assert fields_called("nonsense") == ()


def test_a_setting_is_dropped_for_the_familys_own() -> None:
    names = ["activation", "softmax_scale"]
    model = config(activation="gelu", softmax_scale=0.1)
    model, dropped = without_settings(model, family("llama"), names)
    assert (model.mlp.activation, model.attention.softmax_scale) == ("silu", None)
    assert dropped == {"activation": "gelu", "softmax_scale": 0.1}
    with pytest.raises(UsageError, match="every model has"):
        without_settings(model, None, ["hidden_size"])
    with pytest.raises(UsageError, match="no such setting"):
        without_settings(model, None, ["nonsense"])


def test_keys_of_a_nested_text_model() -> None:
    stored = {"a": 1, "text_config": {"b": 2, "c": 3}}
    assert without_keys(stored, ["a", "b", "d"]) == ({"text_config": {"c": 3}}, {"a": 1, "b": 2})
    assert stored["text_config"] == {"b": 2, "c": 3}
