"""The shipped recipes: all there, each line explained, and what they keep is written in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool import explain_recipe, list_recipes
from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import load_recipe, recipe_names
from tests.support.models import tiny_models

NAMES = [
    "auto_nvfp4_fp8",
    "fp8",
    "fp8_block128",
    "fp8_kv_fp8",
    "fp8_per_channel",
    "int4_awq",
    "int4_gptq",
    "int4_weight_only",
    "int8_sq",
    "int8_weight_only",
    "kv_fp8",
    "kv_nvfp4",
    "mixed_nvfp4_fp8",
    "mxfp4",
    "mxfp4_experts",
    "mxfp4_gptq",
    "mxfp4_learned_rounding",
    "mxfp8",
    "nvfp4",
    "nvfp4_awq",
    "nvfp4_from_mxfp4",
    "nvfp4_gptq",
    "nvfp4_learned_rounding",
    "nvfp4_svdquant",
    "w4a16_nvfp4",
    "w4a8_awq",
]


def test_all_of_them_are_there() -> None:
    assert list(recipe_names()) == NAMES
    assert [r.name for r in list_recipes().recipes] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_explained(name: str, checkout: Path) -> None:
    text = (checkout / "quant_recipes" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.strip()
        said = (
            plain.endswith(":") or plain.startswith(("description:", "format:", "#")) or not plain
        )
        assert said or "# " in plain, f"line {number}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_explains_both_models(name: str, llama: Path, moe: Path) -> None:
    of_experts = name == "mxfp4_experts"
    for path in (llama, moe):
        if of_experts and path is llama:
            with pytest.raises(RecipeError, match="role expert"):
                explain_recipe(path, name)
            continue
        report = explain_recipe(path, name)
        by_name = {m.name: m for m in report.modules}
        kept = [m for m in report.modules if {"embedding", "lm_head", "router"} & {*m.roles}]
        kept += [m for m in report.modules if m.kind == "norm"]
        assert {m.format for m in kept} == {"keep"}
        assert all(m.rules for m in report.modules), "every module is named by some rule"
        assert sum(m.num_bytes for m in report.modules if m.kind != "kv_cache") == report.num_bytes
        if name.startswith("kv_"):
            assert report.num_bytes == report.source_bytes
            assert report.kv_bytes < report.kv_source_bytes
        else:
            assert report.num_bytes < report.source_bytes
            rest = [m for m in report.modules if m.kind == "linear" and m not in kept]
            assert all(
                (m.format != "keep") == ("expert" in m.roles or not of_experts) for m in rest
            )
        assert by_name["embed"].count == 1


def test_a_model_of_outer_layers_alone(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", num_hidden_layers=2)
    report = explain_recipe(path, "mixed_nvfp4_fp8")
    assert {m.format for m in report.modules if m.kind == "linear"} == {"FP8", "keep"}


def test_methods_that_need_no_data_are_those_of_formats_that_need_none() -> None:
    for recipe in map(load_recipe, NAMES):
        calibrates = any(f.algo and f.number.calibrates for f in recipe.formats.values())
        calibrates |= any(f.kv_algo and not f.constant for f in recipe.formats.values())
        assert not (recipe.method == "none" and calibrates), recipe.name
