"""What engines can run: the table, its versions, and what is told about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megtool import explain_recipe
from megtool.errors import RecipeError, UsageError
from megtool.lint.engines import load_engines
from megtool.quant.algorithms.algorithm_config import resolve_algorithm
from megtool.quant.recipes.dialects import load_recipe
from megtool.quant.recipes.engine_models import PLAIN_MODULES
from megtool.quant.recipes.engine_support import (
    TABLE,
    check_engine,
    list_permitted_sets,
    parse_engine,
)
from megtool.quant.recipes.formats import FORMATS, KV_BITS
from megtool.quant.recipes.match import match_rules
from megtool.quant.recipes.modules import ModuleInfo
from megtool.quant.recipes.rules import RecipeProblems
from megtool.quant.resolve import resolve_recipe
from tests.support.errors import raises
from tests.support.models import tiny_models


def test_the_table_names_known_formats_and_a_source_each() -> None:
    for line in TABLE:
        assert set(line.algos) <= set(KV_BITS if line.part == "kv" else FORMATS)
        assert line.source


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("fp8", "vllm@0.9.0"),
        ("fp8_per_channel", "vllm@0.15.0"),
        ("mxfp8", "vllm@0.16.1"),
        ("mixed_nvfp4_fp8", "vllm"),
        ("mixed_nvfp4_fp8", "trtllm"),
        ("auto_nvfp4_fp8", "vllm@main"),
        ("auto_nvfp4_fp8", "vllm@0.19.0"),  # mixes nothing, so one format is chosen beside keep
        ("fp8_kv_fp8", "trtllm@1.3.0rc27"),
        ("int4_awq", "trtllm"),
        ("nvfp4", "sglang"),
    ],
)
def test_engines_that_can(recipe: str, target: str, llama: Path) -> None:
    assert explain_recipe(llama, recipe, target=target).target is not None


@pytest.mark.parametrize(
    ("recipe", "target", "told"),
    [
        ("fp8_per_channel", "vllm@0.13.0", "0.15.0 does, by docs.vllm.ai"),
        ("mxfp8", "vllm@0.15.1", "vllm 0.15.1 does not load MXFP8"),
        ("int4_awq", "vllm", "vllm does not load W4A16_AWQ"),
        ("mixed_nvfp4_fp8", "sglang", "it mixes no formats"),
        ("kv_nvfp4", "vllm@0.16.0", "no KV cache in NVFP4"),
        ("mxfp4", "trtllm", "trtllm does not load MXFP4"),
        ("kv_fp8", "vllm", "run the engine with --kv-cache-dtype fp8"),
        ("kv_fp8", "sglang", "only the KV cache is quantized"),
        ("kv_nvfp4", "trtllm@1.3.0rc27", "Pre-quantized checkpoint must have quant_algo"),
    ],
)
def test_engines_that_cannot(recipe: str, target: str, told: str, llama: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        explain_recipe(llama, recipe, target=target)
    assert told in str(caught.value)


ROWS, BLOCKS = "stay where they are", "scales of blocks of rows, which cannot change places"


@pytest.mark.parametrize(
    ("recipe", "target", "told"),
    [
        ("fp8_block128", "vllm", BLOCKS),
        ("nvfp4", "sglang", ROWS),
        ("nvfp4_awq", "sglang", ROWS),
        ("fp8_per_channel", "vllm@0.15.0", "stay where they are before 0.16.0"),
        ("fp8_per_channel", "vllm", ""),
        ("nvfp4", "vllm@0.15.0", ""),
        ("fp8", "sglang", ""),
    ],
)
def test_scales_of_heads_that_are_turned(recipe: str, target: str, told: str, moe: Path) -> None:
    """The fact that lint's rule `llama4-rotary` goes by, before any work."""
    modules, problems = tiny_models.modules(moe), RecipeProblems("x")
    loaded = load_recipe(recipe)
    decisions = match_rules(loaded, modules, RecipeProblems("x")).decisions
    engine = parse_engine(target)
    check_engine(engine, loaded, decisions, problems, architecture="LlamaForCausalLM")
    assert problems.problems == []
    check_engine(engine, loaded, decisions, problems, architecture="Llama4ForCausalLM")
    assert len(problems.problems) == bool(told)
    assert not told or told in problems.problems[0][1]


def test_cut_blocks_are_not_loaded_as_modelopt_by_vllm(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", head_dim=32)  # k has 64 rows of 128 columns
    with pytest.raises(RecipeError, match=r"cut at the end of a weight.*is 64 x 128") as caught:
        explain_recipe(path, "fp8_block128", target="vllm")
    assert "compressed-tensors" in str(caught.value)
    explain_recipe(path, "fp8_block128", target="trtllm")
    explain_recipe(path, "fp8_block128")
    whole = tiny_models.llama(tmp_path / "whole")
    explain_recipe(whole, "fp8_block128", target="vllm")


def test_turned_heads_limit_a_choice() -> None:
    sglang, both = parse_engine("sglang"), ("FP8", "NVFP4")
    assert list_permitted_sets(sglang, (), both) == [{"FP8"}, {"NVFP4"}]
    assert list_permitted_sets(sglang, (), both, rotary=True) == [{"FP8"}]


def test_a_model_that_is_not_on_the_engines_list(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.models import family_models

    source = family_models.save("gpt2", tmp_path / "gpt2")
    report = explain_recipe(source, "fp8", target="trtllm")
    assert report.doubt.startswith("GPT2LMHeadModel is not on the list of supported models")
    assert "target      trtllm loads these formats, but GPT2" in "\n".join(report.lines())
    assert explain_recipe(source, "fp8", target="vllm").doubt == ""


def test_llama_4_is_known_by_its_class(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.models import family_models

    source = family_models.save("llama4", tmp_path / "llama4")
    with raises(RecipeError, "Llama4ForCausalLM"):
        explain_recipe(source, "nvfp4_awq", target="sglang")
    explain_recipe(source, "fp8", target="sglang")


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_what_a_plain_format_has_no_place_for_is_not_stored(
    target: str, llama: Path, tmp_path: Path
) -> None:
    found = resolve_recipe(llama, "nvfp4_awq", target=target)
    assert found.recipe.folds_scales
    assert any("loads NVFP4 and not NVFP4_AWQ" in n for n in found.matched.notes)
    by = {d.module.name: d.num_bytes for d in found.matched.decisions}
    plain = {d.module.name: d.num_bytes for d in resolve_recipe(llama, "nvfp4").matched.decisions}
    assert by["layers.0.attn.o"] == plain["layers.0.attn.o"]
    assert not resolve_recipe(llama, "nvfp4_awq").recipe.folds_scales
    entries = [{"quantizer_name": "*", "enable": False}]
    cfg = {"num_bits": "e2m1", "block_sizes": {"-1": 16, "type": "dynamic", "scale_bits": "e4m3"}}
    entries += [{"quantizer_name": f"*proj.{p}_quantizer", "cfg": cfg} for p in ("weight", "input")]
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(json.dumps({"quant_cfg": entries, "algorithm": "awq_lite"}))
    assert resolve_recipe(llama, theirs, target=target).recipe.folds_scales
    assert resolve_algorithm(resolve_recipe(llama, theirs, target=target).recipe, None).fold
    assert not resolve_recipe(llama, "int4_awq", target="trtllm").recipe.folds_scales


def test_experts_in_a_format_for_dense_models(llama: Path, moe: Path) -> None:
    explain_recipe(llama, "mxfp8", target="vllm@0.16.0")
    with pytest.raises(RecipeError, match="has no MXFP8 for experts"):
        explain_recipe(moe, "mxfp8", target="vllm@0.16.0")


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            "{glob: '*.attn.q'}: f | {role: qkv}: n",
            "fuses layers.0.attn.qkv, and its parts have different formats",
        ),
        ("{glob: '*.mlp.gate'}: n | {glob: '*.mlp.up'}: f", "gate NVFP4, up FP8"),
        ("{role: kv, layers: 0}: kv", "needs the same KV cache format in all layers"),
    ],
)
def test_what_runs_as_one_has_one_format(
    rules: str, told: str, llama: Path, tmp_path: Path
) -> None:
    lines = [r.rpartition(": ") for r in rules.split(" | ")]
    text = "description: d\nformats:\n"
    known = {"f": "algo: FP8", "n": "algo: NVFP4", "kv": "kv_algo: FP8"}
    text += "".join(f"  {f}: {{{known[f]}}}\n" for f in dict.fromkeys(f for _, _, f in lines))
    text += "rules:\n" + "".join(f"- match: {m}\n  format: {f}\n" for m, _, f in lines)
    (tmp_path / "r.yaml").write_text(text)
    explain_recipe(llama, tmp_path / "r.yaml")
    with pytest.raises(RecipeError) as caught:
        explain_recipe(llama, tmp_path / "r.yaml", target="vllm")
    assert told in str(caught.value)


ROUTERS = """
description: d
formats: {f: {algo: FP8}}
rules:
- {match: {kind: norm}, format: keep}
- {match: {role: [embedding, lm_head]}, format: keep}
- {match: {kind: kv_cache}, format: keep}
- {match: {kind: linear}, format: f}
"""


@pytest.mark.parametrize(
    ("architecture", "refused_by"),
    [
        ("DeepseekV3ForCausalLM", {"vllm", "sglang", "trtllm"}),
        ("Qwen3MoeForCausalLM", {"trtllm"}),
    ],
)
def test_routers_that_engines_build_plain(
    architecture: str, refused_by: set[str], moe: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(ROUTERS)
    decisions = resolve_recipe(moe, tmp_path / "r.yaml").matched.decisions
    for name in ("vllm", "sglang", "trtllm"):
        problems = RecipeProblems("x")
        recipe = load_recipe(tmp_path / "r.yaml")
        check_engine(parse_engine(name), recipe, decisions, problems, architecture=architecture)
        told = [p for p in problems.problems if "model.layers.1.mlp.gate unquantized" in p[1]]
        assert bool(told) == (name in refused_by)
        assert all("match: {role: router}" in hint for _, _, hint in told)


def test_a_projection_before_multi_token_prediction_is_plain(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.models import mtp_models

    mtp_models.glm4_moe(tmp_path / "glm")
    text = ROUTERS.replace("[emb", "[router, emb").replace("FP8", "FP8_PB_WO")
    (tmp_path / "r.yaml").write_text(text)
    with raises(RecipeError, "model.layers.4.eh_proj unquantized"):
        explain_recipe(tmp_path / "glm", tmp_path / "r.yaml", target="trtllm")


def test_the_rules_of_lint_have_the_same_plain_modules() -> None:
    heads = {"lm_head", "head"}
    assert {*PLAIN_MODULES} | heads == {*load_engines().modules.never_quantized}


def test_a_draft_layer_has_a_cache_of_its_own(llama: Path) -> None:
    draft = ModuleInfo(
        name="mtp.0.attn.kv",
        kind="kv_cache",
        roles=frozenset({"kv", "mtp"}),
        layer=None,
        num_layers=4,
        shape=(256,),
        num_bytes=512,
    )
    recipe, problems = load_recipe("fp8_kv_fp8"), RecipeProblems("x")
    matched = match_rules(recipe, (*tiny_models.modules(llama), draft), problems)
    assert matched.decisions[-1].label == "keep"
    check_engine(parse_engine("vllm"), recipe, matched.decisions, problems)
    assert problems.problems == []


@pytest.mark.parametrize(
    "text", ["vlm", "vllm@", "vllm@new", "trtllm@0.5", "vllm@9.9", "vllm@0.9banana"]
)
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_engine(text)
