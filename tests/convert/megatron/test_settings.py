"""Args that change the model and cannot be described are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.convert.megatron.settings import (
    describe_unknown,
    find_unsupported,
    plain_args,
    refusal,
)
from megtool.errors import MappingError
from tests.support.checkpoints.canonical_views import config

DENSE = args_from_config(config()) | {"use_legacy_models": False}
EXPERTS = args_from_config(config(num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=8))
LATENT = DENSE | {"multi_latent_attention": True, "kv_lora_rank": 4}

UNSUPPORTED: list[tuple[dict[str, Any], str, Any]] = [
    (EXPERTS, "moe_expert_capacity_factor", 1.5),
    (EXPERTS, "moe_expert_capacity_factor", "1.5"),
    (EXPERTS, "moe_expert_rank_capacity_factor", 1.0),
    (EXPERTS, "moe_input_jitter_eps", 0.01),
    (EXPERTS, "moe_router_force_load_balancing", True),
    (EXPERTS, "moe_router_load_balancing_type", "quantile_balancing"),
    (EXPERTS, "moe_router_score_function", "tanh"),
    (EXPERTS, "moe_mlp_glu_interleave_size", 32),
    (DENSE, "softmax_type", "entmax"),
    (DENSE, "window_size", (15, -1)),
    (DENSE, "window_size", "(15, 3)"),
    (DENSE, "activation_func", "torch._C._nn.gelu"),
    (DENSE, "apply_residual_connection_post_layernorm", True),
    (DENSE, "spec", ["our.layers", "spec"]),
    (DENSE, "yaml_cfg", "model.yaml"),
    (DENSE, "heterogeneous_layers_config_path", "layers.json"),
    (LATENT, "rotary_interleaved", True),
    (LATENT, "position_embedding_type", "learned_absolute"),
    (LATENT, "mla_down_proj_fusion", True),
]
SUPPORTED: list[tuple[dict[str, Any], str, Any]] = [
    (DENSE, "moe_expert_capacity_factor", 1.5),  # of a model without experts
    (EXPERTS, "moe_expert_capacity_factor", -1.0),
    (EXPERTS, "moe_expert_capacity_factor", None),
    (EXPERTS, "moe_input_jitter_eps", 0.0),
    (EXPERTS, "moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"]),
    (EXPERTS, "moe_router_load_balancing_type", "sinkhorn"),
    (DENSE, "window_size", (15, 0)),
    (DENSE, "window_size", (-1, -1)),
    (DENSE, "activation_func", "torch.nn.functional.silu"),
    (DENSE, "spec", ["megatron.core.models.gpt.gpt_layer_specs", "spec"]),
]


@pytest.mark.parametrize(("base", "name", "value"), UNSUPPORTED)
def test_a_setting_that_changes_the_model_is_refused(
    base: dict[str, Any], name: str, value: Any
) -> None:
    args = base | {name: value}
    if name == "apply_residual_connection_post_layernorm":
        args["use_legacy_models"] = True
    with pytest.raises(MappingError, match=name) as e:
        config_from_args(args)
    assert e.value.id == "unsupported-setting"
    assert f"--drop-setting {name}" in (e.value.hint or "")
    found = find_unsupported(plain_args(args, [name]))
    assert [s.name for s in found] == []


@pytest.mark.parametrize(("base", "name", "value"), SUPPORTED)
def test_a_neutral_value_is_not(base: dict[str, Any], name: str, value: Any) -> None:
    assert find_unsupported(plain_args(base | {name: value})) == []
    config_from_args(base | {name: value})


def test_a_dropped_setting_is_read_as_if_it_were_not_there() -> None:
    args = EXPERTS | {"moe_expert_capacity_factor": 1.5}
    read = config_from_args(args, dropped=("moe_expert_capacity_factor",))
    assert read == config_from_args(EXPERTS)


def test_a_refusal_names_all_settings() -> None:
    args = EXPERTS | {"moe_expert_capacity_factor": 1.5, "yaml_cfg": "x.yaml"}
    error = refusal(find_unsupported(plain_args(args)))
    assert "moe_expert_capacity_factor is 1.5" in error.message
    assert "yaml_cfg is 'x.yaml'" in error.message


def test_sinkhorn_is_what_megatron_computes_in_evaluation() -> None:
    args = EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"}
    two = config_from_args(args | {"moe_router_topk_scaling_factor": 2.5}).router
    assert (two.router_score, two.router_pre_softmax, two.router_scaling) == ("softmax", True, 1.0)
    assert config_from_args(args | {"moe_router_topk": 1}).router.router_score == "sigmoid"


def test_multipliers_of_mup() -> None:
    mup = {"use_mup": True, "mup_base_hidden_size": 16, "mup_embedding_mult": 3.0}
    read = config_from_args(DENSE | {"softmax_scale": None, **mup})
    assert read.embedding.embedding_scale == 3.0
    assert read.head.logit_scale == 16 / read.hidden_size
    assert read.attention.softmax_scale == pytest.approx(1 / read.attention.head_dim)
    assert config_from_args(DENSE | mup | {"mup_output_mult": 0.5}).head.logit_scale == 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"softmax_scale": 0.3},
        {"attn_zero_sinks": True},
        {"embedding_scale": 4.0, "logit_scale": 0.25},
        {"embedding_scale": 4.0, "softmax_scale": 0.3},
        {"qk_l2_norm": True, "qk_l2_norm_unrotated": True, "no_rope_layers": (0, 1)},
    ],
)
def test_written_args_say_the_same_model(fields: dict[str, Any]) -> None:
    model = config(num_layers=2, **fields)
    read = config_from_args(args_from_config(model))
    assert {name: read.get(name) for name in fields} == fields


def test_unknown_settings_are_told_in_a_sentence() -> None:
    assert describe_unknown(["b", "a"]) == (
        "2 settings are unknown to this version, and not read: a, b"
    )
