"""What is written is read back: a setting that would be lost is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megtool.convert.families.detection import family
from megtool.convert.families.read_back import (
    fields_called,
    find_lost_in_class,
    find_unsaid,
    holds,
    lost_settings_error,
    without_keys,
    without_settings,
)
from megtool.errors import UsageError
from tests.support.models.small_configs import EXPERTS, config


def test_a_setting_that_the_family_does_not_write() -> None:
    llama, model = family("llama"), config(softmax_scale=0.1)
    lost = find_lost_in_class(model, llama, llama.write_config(model))
    assert [(s.field, s.value, s.computed) for s in lost] == [("softmax_scale", 0.1, 8**-0.5)]
    assert not holds(llama, model)
    error = lost_settings_error(lost, "config.json", ("granite",))
    assert error.id == "setting-lost"
    assert "attention_multiplier in Hugging Face" in error.message
    assert "--family granite" in str(error.hint)
    assert "--drop-setting softmax_scale" in str(error.hint)


def test_a_key_that_a_table_has_forgotten() -> None:
    qwen = family("qwen3_moe")
    model = config(**EXPERTS, qk_norm=True)
    assert holds(qwen, model)
    forgotten = tuple(s for s in qwen.config if getattr(s, "key", "") != "norm_topk_prob")
    careless = replace(qwen, config=forgotten)
    lost = find_lost_in_class(model, qwen, careless.write_config(model))
    assert [s.field for s in lost] == ["router_pre_softmax"]


def test_what_tensors_say_is_compared_too() -> None:
    assert holds(family("qwen3"), config(qk_norm=True))
    assert not holds(family("qwen3"), config())
    assert not holds(family("qwen2"), config())
    assert not holds(family("qwen3_moe"), config(qk_norm=True))


def test_a_file_that_says_the_same_of_two_models() -> None:
    llama, model = family("llama"), config(window_size=8, rope_base=5.0)
    lost = find_unsaid(model, llama, lambda c: (c.positions.rope_base, c.norms.norm_eps))
    assert [s.field for s in lost] == ["window_size"]


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
