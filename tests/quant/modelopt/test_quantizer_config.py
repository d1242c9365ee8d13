"""A recipe's decisions as ModelOpt's settings, and what ModelOpt cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megtool.errors import RecipeError, UsageError
from megtool.quant.modelopt.quantizer_config import (
    algorithm_for,
    build_modelopt_config,
    name_modules,
    unused_options,
)
from megtool.quant.resolve import resolve_recipe
from tests.support.errors import raises
from tests.support.models import family_models, tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("config") / "llama", num_hidden_layers=2)


def test_what_it_cannot_do_is_said_before_anything_is_loaded(folder: Path) -> None:
    decided = resolve_recipe(folder, "nvfp4")
    decisions = decided.matched.decisions
    searched = replace(decided.recipe, algorithm={"method": "max", "scale_search": True})
    with raises(RecipeError, "scale_search", hint="--backend megtool"):
        build_modelopt_config(searched, decisions)
    theirs = replace(decided.recipe, dialect="modelopt", algorithm={"method": "gptq"})
    with raises(RecipeError, "gptq", "NVFP4", hint="type: static"):
        build_modelopt_config(theirs, decisions)
    folded = replace(decided.recipe, algorithm={"method": "awq", "fold": True})
    with raises(RecipeError, "fold", hint="--backend megtool"):
        build_modelopt_config(folded, decisions)
    observed = replace(decided.recipe, algorithm={"method": "percentile"})
    with raises(RecipeError, "'percentile'", hint="awq_full"):
        build_modelopt_config(observed, decisions)
    fp8 = resolve_recipe(folder, "fp8")
    with raises(RecipeError, "gptq chooses FP8 codes", hint="INT4, INT8 or NVFP4"):
        rounded = replace(fp8.recipe, algorithm={"method": "gptq"})
        build_modelopt_config(rounded, fp8.matched.decisions)
    int4 = resolve_recipe(folder, "int4_weight_only", group_size=64)
    fused = {"method": "gptq", "fused": True}
    with raises(UsageError, "only on a GPU", hint="fused: false"):
        on_gpu = replace(int4.recipe, dialect="modelopt", algorithm=fused)
        build_modelopt_config(on_gpu, int4.matched.decisions)
    decided = resolve_recipe(folder, "mxfp4")
    searched = replace(decided.recipe, algorithm={"method": "mse"})
    with pytest.raises(UsageError, match="runs mse for MXFP4 only on a GPU"):
        build_modelopt_config(searched, decided.matched.decisions)
    assert build_modelopt_config(searched, decided.matched.decisions, device="cuda")
    decided = resolve_recipe(folder, "auto_nvfp4_fp8")
    with pytest.raises(RecipeError, match="is not chosen yet"):
        build_modelopt_config(decided.recipe, decided.matched.decisions)


def test_settings_name_each_module(folder: Path) -> None:
    decided = resolve_recipe(folder, "fp8")
    config = build_modelopt_config(decided.recipe, decided.matched.decisions)
    entries = config["quant_cfg"]
    assert entries[0] == {"quantizer_name": "*", "enable": False}
    names = [e["quantizer_name"] for e in entries[1:]]
    assert len(names) == len(set(names)) == 2 * 2 * 7
    assert "model.layers.1.mlp.down_proj.weight_quantizer" in names


def test_nvfp4_is_rounded_by_us_where_modelopt_needs_a_gpu(folder: Path) -> None:
    decided = resolve_recipe(folder, "nvfp4_awq")
    for device, ours in (("cpu", True), ("cuda", False)):
        config = build_modelopt_config(decided.recipe, decided.matched.decisions, device=device)
        assert {"backend" in e["cfg"] for e in config["quant_cfg"][1:]} == {ours}


def test_scales_of_blocks_are_chosen_where_they_are_kept(folder: Path) -> None:
    """What ModelOpt calls `dynamic` has none that an algorithm could choose."""
    decided = resolve_recipe(folder, "nvfp4")
    name = "model.layers.0.mlp.down_proj.weight_quantizer"
    for algorithm, search in (
        ({"method": "max"}, {}),
        ({"method": "mse"}, {"fp8_scale_sweep": True}),
        ({"method": "gptq"}, {}),
        ({"method": "lsq", "tied_amax": False}, {"method": "lsq", "tied_amax": False}),
        ({"method": "max", "four_over_six": True}, {"start_multiplier": 1.0, "step_size": 0.5}),
    ):
        recipe = replace(decided.recipe, algorithm=algorithm)
        config = build_modelopt_config(recipe, decided.matched.decisions)
        (entry,) = (e for e in config["quant_cfg"] if e["quantizer_name"] == name)
        sizes = entry["cfg"]["block_sizes"]
        assert sizes["type"] == ("dynamic" if algorithm == {"method": "max"} else "static")
        assert bool(sizes.get("four_over_six")) == ("four_over_six" in algorithm)
        assert config["algorithm"].items() >= search.items()


def test_options_have_modelopts_names(folder: Path) -> None:
    decided = resolve_recipe(folder, "int4_awq", group_size=64)
    decisions = decided.matched.decisions
    assert algorithm_for(decided.recipe, decisions, {}) == {"method": "awq_full", "alpha_step": 0.1}
    gptq = replace(decided.recipe, algorithm={"method": "gptq", "damping": 0.05, "shrinkage": 0.3})
    assert algorithm_for(gptq, decisions, {}) == {"method": "gptq", "perc_damp": 0.05}
    assert unused_options(gptq, algorithm_for(gptq, decisions, {})) == ("shrinkage",)
    theirs = replace(
        decided.recipe,
        dialect="modelopt",
        algorithm={"method": "mse", "step_size": 0.2, "layerwise": {"enable": True}},
    )
    assert algorithm_for(theirs, decisions, {}) == {"method": "mse", "step_size": 0.2}
    assert unused_options(theirs, {"method": "mse", "step_size": 0.2}) == ()
    learned = replace(
        decided.recipe, algorithm={"method": "lsq", "learnable_amax": ["pre", "post"]}
    )
    algorithm = algorithm_for(learned, decisions, {})
    assert algorithm["scale_algorithm"] == {"method": "mse"}
    assert unused_options(learned, algorithm) == ()


def test_rows_of_one_module_keep_their_own_names(tmp_path: Path) -> None:
    source = family_models.save("gpt_neox", tmp_path / "neox")
    names = name_modules(resolve_recipe(source, "fp8_kv_fp8").matched.decisions)
    assert names["layers.0.attn.q"] == "layers.0.attn.q"
    assert names["layers.0.attn.kv"] == "layers.0.attn.kv"
    assert names["layers.0.mlp.down"] == "gpt_neox.layers.0.mlp.dense_4h_to_h"
