"""What both config files say, and that they say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megtool.quant.packed_tensors.hf_config import (
    QuantizedLayer,
    hf_quant_config,
    inline,
    quantization,
    summarize_modules,
    with_quantization,
)
from megtool.quant.recipes.formats import FORMATS

A, B = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def said(
    *layers: QuantizedLayer, kept: tuple[str, ...] = ("lm_head",), kv: str | None = None
) -> Any:
    return quantization(layers, kept, kv)


@pytest.mark.parametrize("algo", FORMATS)
def test_both_files_agree(algo: str) -> None:
    groups = FORMATS[algo].groups
    found = said(QuantizedLayer(name=A, algo=algo, group_size=groups[0] if groups else 0))
    beside = json.loads(hf_quant_config(found))
    config = json.loads(with_quantization(b'{"model_type": "llama", "dtype": "bfloat16"}', found))
    within = config["quantization_config"]
    assert config["model_type"] == "llama"
    assert beside["producer"]["name"] == within["producer"]["name"] == "modelopt"
    assert within["quant_method"] == "modelopt"
    quant = beside["quantization"]
    assert quant["exclude_modules"] == within["ignore"] == ["lm_head"]
    for key in ("quant_algo", "group_size", "pre_quant_scale", "has_zero_point"):
        assert quant.get(key) == within.get(key)
    assert "kv_cache_quant_algo" in quant, "loaders ask for the key"
    assert quant.get("group_size", 0) == (groups[0] if groups else 0)
    assert quant["quant_algo"] == ("fp8_pb_wo" if algo == "FP8_PB_WO" else algo)


@pytest.mark.parametrize(("kv", "scheme"), [("FP8", True), ("NVFP4", False), (None, False)])
def test_caches(kv: str | None, scheme: bool) -> None:
    found = said(QuantizedLayer(name=A, algo="NVFP4", group_size=16), kv=kv)
    assert found["kv_cache_quant_algo"] == kv
    within = inline(found)
    assert ("kv_cache_scheme" in within) is scheme
    if scheme:
        assert within["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}


def test_a_mixture_says_each_layer() -> None:
    found = said(
        QuantizedLayer(name=A, algo="FP8"),
        QuantizedLayer(name=B, algo="NVFP4", group_size=16),
    )
    assert found["quant_algo"] == "MIXED_PRECISION"
    layers = {A: {"quant_algo": "FP8"}, B: {"quant_algo": "NVFP4", "group_size": 16}}
    assert found["quantized_layers"] == layers
    within = inline(found)
    assert within["quantized_layers"] == layers
    targets = [g["targets"] for g in within["config_groups"].values()]
    assert targets == [[A], [B]]


def test_two_group_sizes_are_a_mixture() -> None:
    found = said(
        QuantizedLayer(name=A, algo="W4A16_AWQ", group_size=128),
        QuantizedLayer(name=B, algo="W4A16_AWQ", group_size=64),
    )
    assert found["quant_algo"] == "MIXED_PRECISION"


@pytest.mark.parametrize("smoothed", [True, False])
def test_pre_quant_scale_is_said_only_where_one_is(smoothed: bool) -> None:
    found = said(
        QuantizedLayer(name=A, algo="W4A16_AWQ", group_size=128),
        QuantizedLayer(name=B, algo="W4A16_AWQ", group_size=128, smoothed=smoothed),
    )
    assert found["quant_algo"] == "W4A16_AWQ"
    assert found["pre_quant_scale"] is inline(found)["pre_quant_scale"] is smoothed


def test_smoothed_nvfp4_has_a_name_of_its_own() -> None:
    plain = QuantizedLayer(name=A, algo="NVFP4", group_size=16)
    found = said(plain, QuantizedLayer(name=B, algo="NVFP4", group_size=16, smoothed=True))
    assert found["quant_algo"] == "NVFP4_AWQ"
    assert found["pre_quant_scale"] is True
    assert "quantized_layers" not in found
    assert said(plain)["quant_algo"] == "NVFP4"


def test_experts_that_are_all_kept_are_one_glob() -> None:
    first = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(2)]
    second = [f"model.layers.1.mlp.experts.{e}.up_proj" for e in range(2)]
    found = summarize_modules(["lm_head", *first, second[0]], [second[1]])
    assert found == ["lm_head", "model.layers.0.mlp.experts*", second[0]]
