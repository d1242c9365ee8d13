"""LFM2's configurations: sizes of MLPs, kinds of layers, and what Megatron has no word for."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.config.hybrid import hybrid_form
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.convert.megatron.hybrid_pattern import parse_pattern
from megtool.errors import MappingError
from tests.support.errors import raises

PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5],
    "hidden_size": 1024,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "vocab_size": 65536,
}
"""Keys of LFM2-350M as it ships, with fewer layers."""


def test_published_keys_mean_what_transformers_reads_and_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Lfm2Config(**PUBLISHED)
    config = family("lfm2").read_config(PUBLISHED)
    assert config.layer_kinds == ("c-", "c-", "*-", "c-", "c-", "*-")
    assert theirs.layer_types == ["conv", "conv", "full_attention"] * 2
    assert config.embedding.tied_embeddings is theirs.tie_word_embeddings is True
    assert (config.mlp.ffn_hidden_size, config.short_conv.short_conv_taps) == (4608, 3)
    again = family("lfm2").write_config(config)
    assert again.pop("tie_word_embeddings") is True
    kept = {k: v for k, v in PUBLISHED.items() if k != "tie_embedding"}
    assert {k: again.get(k) for k in kept} == kept


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_multiple_of": 7, "intermediate_size": 1000},
        {"block_auto_adjust_ff_dim": False, "intermediate_size": 100},
    ],
)
def test_sizes_of_mlps_are_those_of_transformers(keys: dict[str, Any]) -> None:
    modeling = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    stored = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1} | keys
    mlp = modeling.Lfm2MLP(modeling.Lfm2Config(**stored))
    assert family("lfm2").read_config(stored).mlp.ffn_hidden_size == mlp.w1.weight.shape[0]


def test_other_layers_and_sizes_are_written_in_all_keys_that_say_them() -> None:
    config = family("lfm2").read_config(PUBLISHED)
    changed = config.with_fields(layer_kinds=("*-", *config.layer_kinds[1:]), ffn_hidden_size=640)
    again = family("lfm2").write_config(changed)
    assert again["full_attn_idxs"] == [0, 2, 5]
    assert again["layer_types"][:2] == ["full_attention", "conv"]
    assert (again["block_ff_dim"], again["intermediate_size"]) == (640, 640)
    read = family("lfm2").read_config(again)
    assert (read.layer_kinds, read.mlp.ffn_hidden_size) == (changed.layer_kinds, 640)


def test_layers_without_a_list_are_all_attention() -> None:
    keys = {k: v for k, v in PUBLISHED.items() if k != "full_attn_idxs"}
    assert family("lfm2").read_config(keys).layer_kinds is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"full_attn_idxs": [6]}, "full_attn_idxs is [6]"),
        ({"full_attn_idxs": "all"}, "full_attn_idxs is all"),
        ({"layer_types": ["conv", "mamba"] * 3}, "a layer of the kind 'mamba'"),
        ({"block_ff_dim": 0}, "block_ff_dim is 0"),
        ({"block_multiple_of": True}, "block_multiple_of is True"),
        ({"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier is None"),
        ({"conv_L_cache": 0}, "short_conv_taps is 0"),
    ],
)
def test_keys_that_are_no_model_are_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("lfm2").read_config(PUBLISHED | keys)


def test_args_hold_which_layers_are_convolutions() -> None:
    config = family("lfm2").read_config(PUBLISHED | {"conv_bias": True, "conv_L_cache": 4})
    args = args_from_config(config)
    assert args["experimental_attention_variant"] == "gated_short_conv"
    read = config_from_args(args)
    for name in ("layer_kinds", "short_conv_taps", "short_conv_bias"):
        assert read.get(name) == config.get(name)


def test_hybrid_models_have_no_convolutions() -> None:
    config = family("lfm2").read_config(PUBLISHED)
    with raises(MappingError, "gated short convolutions, and Megatron's HybridModel has none"):
        hybrid_form(config)
    with raises(MappingError, "has the symbol 'c'"):
        parse_pattern("c-*-")
