"""Kimi Linear's configurations: kinds of layers and sizes in both forms, and Megatron's words."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.config.hybrid import gpt_form, hybrid_form
from megtool.convert.families.detection import family
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.convert.megatron.hybrid_pattern import parse_pattern
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from tests.support.errors import raises

LINEAR: dict[str, Any] = {
    "full_attn_layers": [4],
    "head_dim": 128,
    "kda_layers": [1, 2, 3, 5],
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": LINEAR,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""Keys of Kimi-Linear-48B-A3B as it ships, with fewer layers."""


def test_published_keys_mean_what_transformers_reads_and_are_kept() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.KimiLinearConfig(**PUBLISHED)
    config = family("kimi_linear").read_config(PUBLISHED)
    assert config.layer_kinds == ("K-", "KE", "KE", "*E", "KE")
    assert theirs.layer_types == [
        *["linear_attention"] * 3,
        "full_attention",
        "linear_attention",
    ]
    assert (config.delta.linear_num_key_heads, config.delta.linear_value_head_dim) == (32, 128)
    assert config.positions.position_embedding == "none"
    again = family("kimi_linear").write_config(config)
    assert {k: again.get(k) for k in PUBLISHED} == PUBLISHED
    assert "layer_types" not in again


def test_other_layers_and_sizes_are_written_in_both_forms() -> None:
    config = family("kimi_linear").read_config(PUBLISHED)
    changed = config.with_fields(
        layer_kinds=("*-", *config.layer_kinds[1:]),
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    again = family("kimi_linear").write_config(changed)
    assert again["linear_attn_config"] == LINEAR | {
        "full_attn_layers": [1, 4],
        "kda_layers": [2, 3, 5],
        "head_dim": 64,
    }
    assert again["layer_types"][:2] == ["full_attention", "linear_attention"]
    assert again["linear_head_dim"] == 64
    assert family("kimi_linear").read_config(again).layer_kinds == changed.layer_kinds


def test_without_a_list_every_fourth_layer_behind_the_first_is_attention() -> None:
    transformers = pytest.importorskip("transformers")
    keys = {"num_hidden_layers": 10}
    theirs = transformers.KimiLinearConfig(**keys)
    config = family("kimi_linear").read_config(keys)
    kinds = ["full_attention" if "*" in k else "linear_attention" for k in config.layer_kinds or ()]
    assert kinds == theirs.layer_types


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2, 3]}}, "linear_attn_config has the"),
        ({"linear_attn_config": LINEAR | {"kda_layers": "all"}}, "linear_attn_config has the"),
        ({"linear_attn_config": LINEAR | {"head_dim": 0}}, "head_dim of linear_attn_config"),
        ({"linear_attn_config": [4]}, "linear_attn_config is"),
        ({"layer_types": ["mamba"] * 5}, "a layer of the kind 'mamba'"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
    ],
)
def test_keys_that_are_no_model_are_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("kimi_linear").read_config(PUBLISHED | keys)


def test_args_hold_which_layers_have_it_as_gpt_and_as_hybrid_model() -> None:
    config = family("kimi_linear").read_config(PUBLISHED)
    args = args_from_config(config)
    assert args["experimental_attention_variant"] == "kda"
    assert args["kda_two_stage_gates"] is True
    hybrid = hybrid_form(config)
    of_branches = args_from_config(hybrid, ParallelConfig())
    assert of_branches["hybrid_layer_pattern"] == "K-KEKE+EKE"
    assert parse_pattern("K-KEKE+EKE").symbols == "K-KEKE*EKE"
    for read in (config_from_args(args), gpt_form(config_from_args(of_branches))):
        for name in ("layer_kinds", "linear_num_key_heads", "linear_key_head_dim"):
            assert read.get(name) == config.get(name)


@pytest.mark.parametrize("more", [{"kda_two_stage_gates": False}, {"kda_safe_gate": True}])
def test_gates_of_other_models_are_refused(more: dict[str, Any]) -> None:
    args = args_from_config(family("kimi_linear").read_config(PUBLISHED))
    with raises(MappingError, "kda_two_stage_gates is"):
        config_from_args(args | more)
