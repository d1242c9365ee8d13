"""The table of which layers Transformer Engine's modules compute, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megtool.model.stacks.lora import LoraSettings, add_adapters
from megtool.model.stacks.pipeline import build_stages
from megtool.optim.fp8.config import Fp8Config
from megtool.options.config_file import build_options
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.features.module_precision import uniform_precisions
from megtool.train.features.te_layers import (
    TeChoice,
    choose_te_modules,
    describe_te_choices,
    excluded_kinds,
)
from megtool.train.options.config import TrainConfig

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 48,
    "moe_layer_freq": (0, 1),
}
MLP, QKV = "decoder.layers.0.mlp", "decoder.layers.0.self_attention.linear_qkv"
PROJ = "decoder.layers.0.self_attention.linear_proj"


def stages(
    config: ModelConfig | None = None, *, tp: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """A model without memory."""
    groups = ProcessGroups.alone("meta")
    groups = replace(groups, tp=Group(ranks=tuple(range(tp)), rank=0))
    return build_stages(
        ModelConfig.from_fields(**SIZES) if config is None else config, groups, dtype=dtype
    )


def by_owner(choices: list[TeChoice]) -> dict[str, TeChoice]:
    assert len({name for c in choices if c.module for name in c.names}) == sum(
        len(c.names) for c in choices if c.module
    )
    return {choice.owner: choice for choice in choices}


def test_a_dense_model_has_norms_and_products_in_one() -> None:
    choices = choose_te_modules(stages())
    assert [c.module for c in choices if c.owner.startswith("decoder.layers.0")] == [
        "DotProductAttention",
        "LayerNormLinear",
        None,
        "LayerNormMLP",
    ]
    found = by_owner(choices)
    assert found[MLP].names == (f"{MLP}.linear_fc1", f"{MLP}.linear_fc2")
    assert found[PROJ].reason == "torch multiplies in 16 bits"
    assert describe_te_choices(choices) == {
        "layers 0-1: self_attention.core_attention": "DotProductAttention",
        "layers 0-1: self_attention.linear_qkv": "LayerNormLinear",
        "layers 0-1: self_attention.linear_proj": "own kernels (torch multiplies in 16 bits)",
        "layers 0-1: mlp": "LayerNormMLP",
    }


@pytest.mark.parametrize(
    ("more", "qkv", "mlp"),
    [
        ({"activation": "gelu", "gated": False}, "", "activation gelu"),
        ({"activation": "quick_gelu", "activation_limit": 7.0}, "", "a limit"),
        ({"mlp_gate_scale": 0.5}, "", "a scale"),
        ({"parallel_residual": True, "shared_norm": True}, "one norm feeds", "one norm feeds"),
        ({"norm": "layernorm", "norm_bias": False}, "no bias", "no bias"),
        ({"norm_weight": False}, "no norm with a weight", "no norm with a weight"),
        ({"pre_norms": False, "norms_after_add": True}, "torch multiplies", "no norm with a"),
    ],
)
def test_what_a_module_cannot_do_is_ours(more: dict[str, Any], qkv: str, mlp: str) -> None:
    found = by_owner(choose_te_modules(stages(ModelConfig.from_fields(**(SIZES | more)))))
    assert (found[QKV].module is None) == bool(qkv)
    assert qkv in found[QKV].reason
    assert found[MLP].module is None
    assert mlp in found[MLP].reason
    fc1 = found[f"{MLP}.linear_fc1"]  # its norm and the product behind it may still be one
    assert (fc1.module is None) == bool(qkv)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"attn_softcap": 30.0}, "soft cap"),
        ({"attn_sinks": True, "window_size": 8}, "sinks in a window"),
        ({"position_embedding": "alibi"}, "biases"),
        ({"head_dim": 512}, "256"),
    ],
)
def test_attention_that_is_left_to_our_own_kernels(more: dict[str, Any], reason: str) -> None:
    found = by_owner(choose_te_modules(stages(ModelConfig.from_fields(**(SIZES | more)))))
    core = found["decoder.layers.0.self_attention.core_attention"]
    assert core.module is None
    assert reason in core.reason


def test_sinks_of_whole_rows_are_its_own() -> None:
    found = by_owner(choose_te_modules(stages(ModelConfig.from_fields(**SIZES, attn_sinks=True))))
    core = found["decoder.layers.0.self_attention.core_attention"]
    assert core.module == "DotProductAttention"


def test_experts_are_grouped_linears_whose_norm_is_their_own() -> None:
    found = by_owner(choose_te_modules(stages(ModelConfig.from_fields(**SIZES, **EXPERTS))))
    names = [f"decoder.layers.1.mlp.experts.experts.linear_fc{i}" for i in (1, 2)]
    assert [found[name].module for name in names] == ["GroupedLinear"] * 2
    assert "decoder.layers.1.mlp" not in found
    text = describe_te_choices(found.values())
    assert text["layers 1: mlp.experts.linear_fc1"] == "GroupedLinear"


def test_fp8_takes_linears_and_leaves_other_layers_alone() -> None:
    config = ModelConfig.from_fields(**SIZES, **EXPERTS)
    settings = uniform_precisions(Fp8Config(num_layers_at_start_in_bf16=1, fp8_recipe="delayed"), 2)
    found = by_owner(choose_te_modules(stages(config), settings.of, has_fp8=True))
    one = "decoder.layers.1"
    assert found[f"{one}.self_attention.linear_proj"].module == "Linear"
    assert found[f"{one}.self_attention.linear_qkv"].module == "LayerNormLinear"
    assert found[f"{one}.mlp.experts.experts.linear_fc1"].module == "GroupedLinear"
    assert found[QKV].module is None
    assert "between layers in FP8" in found[QKV].reason
    odd = ModelConfig.from_fields(**(SIZES | EXPERTS | {"moe_ffn_hidden_size": 40}))
    found = by_owner(choose_te_modules(stages(odd), settings.of, has_fp8=True))
    assert "multiple of 16" in found[f"{one}.mlp.experts.experts.linear_fc2"].reason


def test_layouts_and_dtypes_have_their_reasons() -> None:
    assert "tensor parallelism" in by_owner(choose_te_modules(stages(tp=2)))[QKV].reason
    assert "TF32" in by_owner(choose_te_modules(stages(dtype=torch.float32)))[QKV].reason
    made = stages()
    add_adapters(made, LoraSettings(rank=2, alpha=2.0))
    assert "LoRA" in by_owner(choose_te_modules(made))[QKV].reason
    made = stages()
    made[0].get_submodule(f"{MLP}.linear_fc2").tap = nn.Identity()
    found = by_owner(choose_te_modules(made))
    assert "another feature" in found[MLP].reason
    assert found[f"{MLP}.linear_fc1"].module == "LayerNormLinear"


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, set()),
        ({"lora_rank": 4}, {"LayerNormLinear", "LayerNormMLP"}),
        (
            {"cuda_graph_impl": "local"},
            {"LayerNormLinear", "LayerNormMLP", "GroupedLinear", "DotProductAttention"},
        ),
        (
            {"recompute_granularity": "selective"},
            {"LayerNormLinear", "LayerNormMLP", "GroupedLinear"},
        ),
        ({"recompute_granularity": "full"}, set()),
    ],
)
def test_options_exclude_modules(options: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    settings = build_options(TrainConfig, {"data": (str(tmp_path),), **options})
    excluded = excluded_kinds(settings)
    assert set(excluded) == kinds
    found = by_owner(choose_te_modules(stages(), excluded=excluded))
    assert (found[QKV].module is None) == bool(kinds)
    assert all(reason in found[QKV].reason for reason in list(excluded.values())[:1])
