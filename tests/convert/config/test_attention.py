"""Attention in older families' configurations: both ways, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.models.tiny_model import SIZES, sizes_of


def stored(name: str, **keys: Any) -> dict[str, Any]:
    return sizes_of(name, SIZES) | keys


@pytest.mark.parametrize(
    ("types", "want"),
    [
        ([[["global", "local"], 2]], (256, (0, 1, 0, 1))),
        ([[["local"], 4]], (256, None)),
        ([[["local", "global"], 2]], (256, 2)),
        ([[["global"], 3], [["local"], 1]], (256, (0, 0, 0, 1))),
        ([[["global"], 4]], (0, None)),
    ],
)
def test_local_layers_of_gpt_neo_have_windows(types: Any, want: Any) -> None:
    neo = family("gpt_neo")
    keys = stored("gpt_neo", num_layers=4, attention_types=types)
    config = neo.read_config(keys)
    assert (config.window.window_size, config.window.window_skip_freq) == want
    assert neo.write_config(config)["attention_types"] == types
    fewer = config.with_fields(num_layers=2, window_skip_freq=(1, 0), window_size=8)
    written = neo.write_config(fewer)
    assert written["attention_types"] == [[["local", "global"], 1]]
    assert written["attention_layers"] == ["local", "global"]
    read = neo.read_config(written)
    assert (read.window.window_size, read.window.window_skip_freq) == (8, 2)


@pytest.mark.parametrize(
    "types", [[[["global"], 3]], [[["odd"], 4]], [[["local"], "x"]], [["local"]], 3]
)
def test_lists_that_are_no_layers_are_refused(types: Any) -> None:
    with raises(MappingError, "attention_types"):
        family("gpt_neo").read_config(stored("gpt_neo", num_layers=4, attention_types=types))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alibi", False),
        ("prefix_lm", True),
        ("qk_ln", True),
        ("attn_type", "multiquery_attention"),
    ],
)
def test_what_the_family_mpt_does_not_know_is_named(key: str, value: Any) -> None:
    with raises(MappingError, f"attn_config.{key}={value!r}"):
        family("mpt").read_config(stored("mpt", attn_config={key: value}))
    with raises(MappingError, "attn_config is 'odd'"):
        family("mpt").read_config(stored("mpt", attn_config="odd"))


def test_the_largest_slope_of_mpt_is_written_beside_what_was_kept() -> None:
    mpt = family("mpt")
    config = mpt.read_config(stored("mpt", attn_config={"attn_impl": "torch"}))
    assert config.positions.alibi_bias_max == 8
    assert mpt.write_config(config)["attn_config"] == {"attn_impl": "torch"}
    written = mpt.write_config(config.with_fields(alibi_bias_max=4.0))
    assert written["attn_config"] == {"attn_impl": "torch", "alibi": True, "alibi_bias_max": 4}
    assert mpt.read_config(written).positions.alibi_bias_max == 4


def test_one_head_of_keys_or_as_many_as_of_queries() -> None:
    starcoder = family("gpt_bigcode")
    config = starcoder.read_config(stored("gpt_bigcode"))
    assert config.attention.num_kv_heads == 1
    many = starcoder.read_config(stored("gpt_bigcode", multi_query=False))
    assert many.attention.num_kv_heads == many.attention.num_heads
    assert starcoder.write_config(many)["multi_query"] is False
    with raises(MappingError, "num_kv_heads is 2"):
        starcoder.write_config(config.with_fields(num_kv_heads=2))


def test_embeddings_are_scaled_by_a_flag() -> None:
    trinity = family("afmoe")
    keys = SIZES | {"head_dim": 8, "num_experts": 4, "num_dense_layers": 0, "mup_enabled": True}
    config = trinity.read_config(keys)
    assert config.embedding.embedding_scale == 32**0.5
    assert trinity.write_config(config)["mup_enabled"] is True
    assert trinity.write_config(config.with_fields(embedding_scale=1.0))["mup_enabled"] is False
    with raises(MappingError, "embedding_scale is 2.0"):
        trinity.write_config(config.with_fields(embedding_scale=2.0))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"do_layer_norm_before": False, "word_embed_proj_dim": 16}, "do_layer_norm_before=False"),
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim=16, but the family knows 32"),
    ],
)
def test_opt_350m_is_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("opt").read_config(stored("opt", **keys))


def test_published_settings_of_bloom_have_older_names() -> None:
    old = {"n_embed": 32, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 101}
    config = family("bloom").read_config(old)
    assert (config.hidden_size, config.attention.num_heads, config.mlp.ffn_hidden_size) == (
        32,
        4,
        128,
    )
    assert config.positions.position_embedding == "alibi"


@pytest.mark.parametrize(
    ("bases", "rope", "local", "still"),
    [
        (None, 10000.0, None, None),
        ([0, 10000.0, 10000.0, 0], 10000.0, None, (1, 0, 0, 1)),
        ([0, 2e4, 2e4, 2e4], 2e4, None, (1, 0, 0, 0)),
        ([5e5, 2e4, 0, 2e4], 5e5, 2e4, (0, 0, 1, 0)),
        ([0, 0, 0, 0], 10000.0, None, (1, 1, 1, 1)),
    ],
)
def test_rotary_bases_of_layers(bases: Any, rope: float, local: Any, still: Any) -> None:
    """The first of four layers attends to all tokens, and the others have a window."""
    keys = stored("granite_swa", num_hidden_layers=4, layer_rope_theta=bases)
    config = family("granite_swa").read_config(keys)
    assert config.window.window_skip_freq == (0, 1, 1, 1)
    assert (
        config.positions.rope_base,
        config.positions.rope_local_base,
        config.positions.no_rope_layers,
    ) == (rope, local, still)
    again = family("granite_swa").write_config(config.with_fields(extra={}))
    assert again["layer_rope_theta"] == (bases or [rope] * 4)
    assert family("granite_swa").read_config(again).positions.rope_local_base == local


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_rope_theta": [1e4]}, "layer_rope_theta is [10000.0]"),
        ({"layer_rope_theta": [0, 1e4, 2e4, 1e4]}, "2 bases for layers with a window"),
        (
            {
                "layer_rope_theta": [5e5, 1e4, 1e4, 1e4],
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
            "two bases, and rotary embeddings are scaled",
        ),
    ],
)
def test_rotary_bases_that_are_not_known_are_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("granite_swa").read_config(stored("granite_swa", num_hidden_layers=4, **keys))


def test_mpt_clamps_and_scales() -> None:
    keys = stored("mpt", attn_config={"clip_qkv": 6, "softmax_scale": 0.3})
    config = family("mpt").read_config(keys)
    assert (config.attention.qkv_clip, config.attention.softmax_scale) == (6, 0.3)
    changed = family("mpt").write_config(config.with_fields(qkv_clip=0.0))
    assert changed["attn_config"]["clip_qkv"] is None
    assert changed["attn_config"]["softmax_scale"] == 0.3


def test_a_list_of_all_layers_comes_before_the_repeated_ones() -> None:
    """Published files have both, and transformers computes by this one."""
    kinds = ["local", "local", "global", "local"]
    keys = {"num_layers": 4, "attention_types": [[["global"], 4]], "attention_layers": kinds}
    config = family("gpt_neo").read_config(stored("gpt_neo", **keys))
    assert [config.window.has_window(n) for n in range(4)] == [k == "local" for k in kinds]
    with raises(MappingError, "window_size"):
        family("gpt_neo").read_config(stored("gpt_neo", **keys, window_size=0))


def test_gpt2_scales_scores() -> None:
    keys = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}
    config = family("gpt2").read_config(stored("gpt2", **keys))
    assert (config.attention.softmax_scale, config.attention.attn_scale_by_layer) == (1.0, True)
    assert family("gpt2").write_config(config).items() >= keys.items()
    with raises(MappingError, "softmax_scale"):
        family("gpt2").write_config(config.with_fields(softmax_scale=0.7))
