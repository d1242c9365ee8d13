"""Every family with every shipped recipe: codes are what they should be, and engines load them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megtool import export, lint, quantize, verify
from megtool.errors import MappingError, MegtoolError, RecipeError, UsageError
from megtool.quant.recipes.dialects import recipe_names
from megtool.quant.recipes.engine_support import ENGINES
from megtool.quant.resolve import resolve_recipe
from tests.support.models import family_models
from tests.support.models.nested_cases import CASES, NestedCase, save_quantizable

pytest.importorskip("transformers")

BY_ENGINE = ("auto_nvfp4_fp8", "nvfp4_awq", "w4a8_awq", "int4_awq")
"""Recipes whose result depends on the engine: which formats it mixes, what is folded."""

CALIBRATED = ("fp8", "int8_sq", "int4_awq", "nvfp4")
"""Recipes of each kind that measures activations."""

IN_COMPRESSED = {
    "fp8_per_channel": ("vllm", "sglang"),
    "int8_sq": ("vllm",),
    "int8_weight_only": ("vllm",),
    "int4_weight_only": ("vllm", "sglang"),
}
"""Recipes with engines that load them exported to compressed-tensors."""


def group_size(recipe: str) -> int | None:
    """Columns of the smallest matrices, instead of 128."""
    return 64 if recipe.startswith("int4") or recipe == "w4a8_awq" else None


def engines_of(source: Path, recipe: str) -> list[str]:
    """The engines that load what a recipe makes of a model."""
    found = []
    for engine in ENGINES:
        try:
            resolved = resolve_recipe(source, recipe, target=engine, group_size=group_size(recipe))
        except RecipeError:
            continue
        found += [] if resolved.doubt else [engine]
    return found


def findings(folder: Path, engine: str) -> list[str]:
    """What `lint` says, but that of DeepSeek-V4's FP8 blocks engines have a form of their own."""
    return [
        f"{f.severity} {f.id}: {f.module}: {f.message}"
        for f in lint(folder, target=engine).findings
        if f.id != "deepseek-v4-form"
    ]


def check_compressed(quantized: Path, recipe: str) -> None:
    """What is exported for an engine that loads it exported is sound to `lint`."""
    for engine in IN_COMPRESSED[recipe]:
        there = quantized.with_name(f"{quantized.name}-{engine}")
        try:
            export(quantized, there, to="compressed-tensors", target=engine, fsync=False)
        except MegtoolError:
            continue
        told = findings(there, engine)
        assert not told, (recipe, engine, told)
        shutil.rmtree(there)


def check(source: Path, out: Path, recipe: str, engines: list[str], target: str | None) -> None:
    """Quantize, verify, lint; and again what is exported to compressed-tensors."""
    report = quantize(
        source,
        out,
        recipe=recipe,
        target=target,
        group_size=group_size(recipe),
        samples=8,
        seq_length=64,
        threads=1,
        fsync=False,
    )
    assert report.proof is not None
    # GPTQ adds the errors of columns to others, and AWQ scales columns by inputs: with the few
    # tokens here 2 % of an expert's elements may lie over the scale, and one scale far from others.
    is_told = {"clipped", "scale-outlier"} if recipe.endswith(("_gptq", "_awq")) else set[str]()
    assert [f for f in report.proof.findings if f.id not in is_told or f.severity == "error"] == []
    assert verify(source, out).exit_status == 0
    for engine in engines:
        told = findings(out, engine)
        assert not told, (recipe, engine, told)
    if recipe in IN_COMPRESSED:
        check_compressed(out, recipe)
    shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_recipes_that_engines_load_give_what_they_load(family: str, tmp_path: Path) -> None:
    source = family_models.save(family, tmp_path / "source")
    clean, refused = [], {}
    for recipe in sorted({*recipe_names()} - {"nvfp4_from_mxfp4"}):  # it needs an MXFP4 source
        engines = engines_of(source, recipe)
        apart = [([e], e) for e in engines] if recipe in BY_ENGINE else [(engines, None)]
        for group, target in apart:
            try:
                check(source, tmp_path / f"{recipe}-{target}", recipe, group, target)
            except (RecipeError, MappingError, UsageError) as error:
                # `auto` has a budget that may be below what an engine loads of a family, and an
                # algorithm that not every family can be measured with; the hint names others.
                assert not isinstance(error, UsageError) or (recipe in BY_ENGINE and error.hint)
                refused[recipe, target] = str(error)
                continue
            clean += group
    print(family, sorted(set(clean)), refused)
    assert clean


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_models_beside_towers_are_calibrated(case: NestedCase, tmp_path: Path) -> None:
    source = save_quantizable(case, tmp_path / "source")
    for recipe in CALIBRATED:
        engines = engines_of(source, recipe)
        target = engines[0] if recipe in BY_ENGINE and engines else None
        check(source, tmp_path / recipe, recipe, [target] if target else engines, target)


def test_a_format_that_an_engine_loads_exported_alone_is_told_with_the_way(tmp_path: Path) -> None:
    """SGLang has FP8 with a scale per row in compressed-tensors, not in ModelOpt's form."""
    source, out = family_models.save("llama", tmp_path / "source"), tmp_path / "out"
    quantize(source, out, recipe="fp8_per_channel", threads=1, fsync=False)
    (told,) = lint(out, target="sglang").findings
    assert (told.severity, told.id) == ("error", "algorithm")
    assert "sglang loads FP8_PER_CHANNEL_PER_TOKEN from what megtool export" in told.hint
    check_compressed(out, "fp8_per_channel")


def test_experts_whose_rows_are_one_group_are_fused_with_others(tmp_path: Path) -> None:
    """Their down projection has as many columns as a group."""
    source, out = family_models.save("qwen3_moe", tmp_path / "source"), tmp_path / "out"
    quantize(source, out, recipe="int4_weight_only", group_size=64, threads=1, fsync=False)
    check_compressed(out, "int4_weight_only")
