"""MiMo-V2-Flash's configurations: windows and heads in both forms, and Megatron-Bridge's words."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.errors import MappingError
from megtool.spec import layer_sets
from tests.support.errors import raises

PUBLISHED: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}
"""Keys of MiMo-V2-Flash as it ships, with fewer layers."""


def test_published_keys_mean_what_transformers_reads_and_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MiMoV2FlashConfig(**PUBLISHED)
    config = family("mimo_v2_flash").read_config(PUBLISHED)
    flags = [config.window.has_window(n) for n in range(7)]
    assert [t == "sliding_attention" for t in theirs.layer_types] == flags
    assert config.window.window_size == theirs.sliding_window == 129
    assert config.layer_sizes == {"num_kv_heads": (4, 8, 8, 8, 8, 4, 8)}
    assert (
        config.attention.head_dim,
        config.attention.value_size,
        config.attention.attn_value_scale,
    ) == (192, 128, 0.707)
    assert int(config.attention.head_dim * config.positions.rotary_percent) == 64
    assert layer_sets.sink_layers(config) == {1, 2, 3, 4, 6}
    assert layer_sets.moe_layers(config) == set(range(1, 7))
    again = family("mimo_v2_flash").write_config(config)
    kept = PUBLISHED | {"routed_scaling_factor": 1.0}
    assert {k: again.get(k) for k in kept} == kept
    assert transformers.MiMoV2FlashConfig(**again).to_dict()["rope_parameters"] == {
        "full_attention": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 0.334,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.334,
        },
    }


def test_other_windows_are_written_in_both_forms() -> None:
    config = family("mimo_v2_flash").read_config(PUBLISHED)
    changed = config.with_fields(
        window_skip_freq=(0, 0, 1, 1, 1, 1, 1),
        layer_sizes={"num_kv_heads": (4, 4, 8, 8, 8, 8, 8)},
        window_size=65,
    )
    again = family("mimo_v2_flash").write_config(changed)
    assert again["hybrid_layer_pattern"] == [0, 0, 1, 1, 1, 1, 1]
    assert again["layer_types"][1:3] == ["full_attention", "sliding_attention"]
    assert (again["num_key_value_heads"], again["swa_num_key_value_heads"]) == (4, 8)
    assert again["sliding_window_size"] == 64
    read = family("mimo_v2_flash").read_config(again)
    for name in ("window_skip_freq", "layer_sizes", "window_size"):
        assert read.get(name) == changed.get(name)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is [0, 1]"),
        ({"hybrid_layer_pattern": [0, 2, 1, 1, 1, 0, 1]}, "hybrid_layer_pattern is"),
        ({"layer_types": ["conv"] * 7}, "layer_types is"),
        ({"swa_num_key_value_heads": 0}, "swa_num_key_value_heads is 0"),
        ({"sliding_window_size": "wide"}, "sliding_window_size is 'wide'"),
        ({"swa_head_dim": 128}, "swa_head_dim=128"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias=True"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
    ],
)
def test_keys_that_are_no_model_are_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("mimo_v2_flash").read_config(PUBLISHED | keys)


def test_heads_that_do_not_go_by_windows_are_refused() -> None:
    config = family("mimo_v2_flash").read_config(PUBLISHED)
    odd = config.with_fields(layer_sizes={"num_kv_heads": (8, 8, 8, 8, 8, 4, 8)})
    with raises(MappingError, "num_kv_heads is (8, 8, 8, 8, 8, 4, 8)"):
        family("mimo_v2_flash").write_config(odd)


def test_args_are_those_of_megatron_bridge() -> None:
    config = family("mimo_v2_flash").read_config(PUBLISHED)
    args = args_from_config(config)
    of_bridge = ("full_attn_num_query_groups", "swa_num_query_groups", "v_head_dim")
    assert [args[n] for n in of_bridge] == [4, 8, 128]
    assert args["attention_value_scale"] == 0.707
    read = config_from_args(args)
    for name in ("layer_sizes", "num_kv_heads", "v_head_dim", "rope_local_base", "window_sinks"):
        assert read.get(name) == config.get(name)
