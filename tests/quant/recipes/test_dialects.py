"""Foreign recipes, read as they are: their own precedence, their own names, their own traps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import load_recipe
from megtool.quant.recipes.match import MatchResult, match_rules
from megtool.quant.recipes.rules import RecipeProblems
from tests.support.errors import raises
from tests.support.models import tiny_models
from tests.support.quant.recipe_texts import COMPRESSED, FP8, MEGATRON, OFF, both, recipe_from


def matched(data: dict[str, Any], path: Path) -> MatchResult:
    problems = RecipeProblems("x")
    found = match_rules(recipe_from(data), tiny_models.modules(path), problems)
    problems.raise_all()
    return found


def labels(data: dict[str, Any], path: Path) -> dict[str, str]:
    return {d.module.name: d.label for d in matched(data, path).decisions}


def test_megatrons_first_match_wins_and_is_off_unless_enabled(llama: Path) -> None:
    found = labels(MEGATRON, llama)
    assert found["layers.0.attn.q"] == found["embed"] == found["head"] == "keep"
    assert found["layers.1.attn.q"] == found["layers.1.attn.v"] == "NVFP4"
    assert found["layers.1.attn.o"] == found["layers.3.mlp.down"] == "MXFP8"
    assert "1 matchers do not say `enabled: true`" in " ".join(recipe_from(MEGATRON).notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"matcher": {}}, "did you mean 'matchers'?"),
        (
            {"matchers": {"a": {"type": "glob", "pattern": "*", "config": "x", "enabled": True}}},
            "'x'",
        ),
        ({"matchers": {"a": {"type": "glob", "pattern": "*", "enabled": True}}}, "needs type"),
        (
            {"matchers": {"a": {"type": "re", "pattern": "*", "config": "bf16", "enabled": True}}},
            "Megatron has glob",
        ),
        (
            {"configs": {"a": {"training_recipe": {"fp8_quantization_recipe": "delayed"}}}},
            "delayed",
        ),
        ({"configs": {"a": {"kitchen": 1}}}, "no training_recipe"),
    ],
)
def test_what_megatron_lets_pass_is_told(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(MEGATRON | change)
    assert told in str(caught.value)


@pytest.mark.peers
def test_megatrons_own_matcher_agrees(moe: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.quantization.quant_config import MatchContext, RecipeConfig

    theirs = RecipeConfig.from_config_dict(MEGATRON)
    algos = {"bf16": "keep", "mxfp8": "MXFP8", "nvfp4": "NVFP4", None: "keep"}
    seen = 0
    for d in matched(MEGATRON, moe).decisions:
        if d.module.roles & {"qkv", "proj", "fc1", "fc2"}:
            for name in d.module.names["megatron"]:
                key = theirs.match_to_config_key(MatchContext(name, d.module.layer))
                assert d.label == algos[key], name
                seen += 1
    assert seen > 60


GROUPS = {"rest": "FP8_PER_CHANNEL_PER_TOKEN", "mlps": "W4A16_AWQ", "one": "W8A16"}


def test_compressed_tensors_takes_the_most_exact_target(llama: Path) -> None:
    found = labels(COMPRESSED, llama)
    assert found["head"] == found["layers.0.attn.q"] == found["layers.0.mlp.up"] == "keep"
    assert found["layers.3.attn.q"] == GROUPS["rest"]
    assert found["layers.3.mlp.up"] == GROUPS["mlps"]
    assert found["layers.3.mlp.down"] == GROUPS["one"]
    assert found["layers.0.attn.kv"] == "KV FP8"
    whole = {"model_type": "llama", "quantization_config": COMPRESSED}
    assert labels(whole, llama) == found


def test_schemes_of_compressed_tensors_by_name(llama: Path) -> None:
    found = labels({"config_groups": {"W4A16": ["Linear"]}, "ignore": ["lm_head"]}, llama)
    assert (found["head"], found["layers.0.attn.o"]) == ("keep", "W4A16_AWQ")
    with pytest.raises(RecipeError, match="did you mean 'W4A16'"):
        recipe_from({"config_groups": {"W4A17": ["Linear"]}})


def test_settings_no_engine_has(llama: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 64}}
    with pytest.raises(RecipeError, match="weights int3 64, inputs as they are"):
        recipe_from({"config_groups": {"g": group}})


@pytest.mark.peers
def test_compressed_tensors_own_matcher_agrees(llama: Path, moe: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.utils.match import is_match, match_targets
    from torch import nn

    linear = nn.Linear(1, 1)
    targets = {t: g for g, s in COMPRESSED["config_groups"].items() for t in s["targets"]}  # type: ignore[attr-defined]
    seen = set()
    for d in (*matched(COMPRESSED, llama).decisions, *matched(COMPRESSED, moe).decisions):
        if d.module.kind == "linear":
            (name,) = d.module.names["hf"]
            first = match_targets(name, linear, list(targets))[:1]
            ignored = is_match(name, linear, COMPRESSED["ignore"])  # type: ignore[arg-type]
            wanted = GROUPS[targets[first[0]]] if first and not ignored else "keep"
            assert d.label == wanted, name
            seen.add(wanted)
    assert seen == {*GROUPS.values(), "keep"}


INT8 = {"num_bits": 8, "axis": 0}


def test_modelopts_last_match_wins_for_each_quantizer(llama: Path) -> None:
    entries = [OFF, *both("*", FP8)]
    entries += [{"quantizer_name": "*layers.1.*", "enable": False}]
    entries += [
        {"quantizer_name": f"*layers.1.*q_proj.{p}_quantizer", "enable": True}
        for p in ("weight", "input")
    ]
    entries += [{"quantizer_name": "*down_proj.weight_quantizer", "cfg": INT8}]
    entries += [{"quantizer_name": "*down_proj.input_quantizer", "enable": False}]
    entries += [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8 | {"use_constant_amax": True}}]
    entries += [{"quantizer_name": "*", "parent_class": "nn.Embedding", "enable": False}]
    found = matched({"quant_cfg": entries, "algorithm": "max"}, llama)
    by = {d.module.name: d for d in found.decisions}
    assert by["layers.0.attn.q"].label == by["head"].label == "FP8"
    assert by["layers.1.attn.q"].label == "FP8"  # enabled again, with the settings it had
    assert by["layers.1.attn.k"].label == by["embed"].label == "keep"
    assert by["layers.2.mlp.down"].label == "W8A16"
    assert by["layers.0.attn.kv"].label == "KV FP8"
    assert by["layers.0.attn.kv"].format is not None
    assert by["layers.0.attn.kv"].format.constant
    assert by["layers.2.mlp.down"].rules == (6, 7)


def test_modelopts_older_forms(llama: Path) -> None:
    new = {"quant_cfg": [OFF, *both("*", FP8), {"quantizer_name": "*lm_head*", "enable": False}]}
    new["quant_cfg"].append(
        {"quantizer_name": "*", "parent_class": "nn.Embedding", "enable": False}
    )
    old = {
        "default": {"enable": False},
        "*weight_quantizer": FP8,
        "*input_quantizer": FP8,
        "*lm_head*": {"enable": False},
        "nn.Embedding": {"*": {"enable": False}},
    }
    assert labels({"quant_cfg": old}, llama) == labels(new, llama)


def test_a_list_that_switches_nothing_off_is_told(llama: Path) -> None:
    assert "INT8 whatever no entry names" in " ".join(
        recipe_from({"quant_cfg": both("*", FP8)}).notes
    )


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"quant_cfg": [{"quantizer_nam": "*", "enable": False}]}, "did you mean 'quantizer_name'"),
        ({"quant_cfg": [{"quantizer_name": "*"}]}, "says nothing"),
        ({"quant_cfg": 3}, "a list of entries"),
        ({"quantize": {"algorithm": "max"}}, "no quant_cfg"),
        ({"quant_cfg": [], "imports": {"a": "no/such"}}, "import 'no/such' is not found"),
        ({"quant_cfg": [], "imports": {"a": "../../etc/passwd"}}, "is circular, absolute"),
        ({"quant_cfg": [{"$import": "b"}]}, "unknown import 'b'"),
        ({"auto_quantize": {"candidate_formats": []}}, "needs candidate_formats"),
    ],
)
def test_what_is_wrong_with_modelopts(data: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from(data)
    assert told in str(caught.value)


def test_a_pair_no_engine_has(llama: Path) -> None:
    odd = {"num_bits": (3, 2), "block_sizes": {-1: 32, "scale_bits": (8, 0)}}
    with raises(RecipeError, "num_bits [3, 2]"):
        labels({"quant_cfg": [OFF, *both("*proj.", odd)]}, llama)


def test_imports_are_looked_for_beside_the_recipe(llama: Path, tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    (units / "fp8.yaml").write_text("num_bits: e4m3\naxis: null\n")
    (units / "all.yaml").write_text(
        "imports:\n  fp8: units/fp8\n---\n"
        "- quantizer_name: '*weight_quantizer'\n  cfg: {$import: fp8}\n"
        "- quantizer_name: '*input_quantizer'\n  cfg:\n    $import: fp8\n"
    )
    (units / "round.yaml").write_text("imports: {x: units/round}\n---\n- $import: x\n")
    head = "imports:\n  all: units/all\nmetadata: {recipe_type: ptq, description: mine}\n"
    path = tmp_path / "deep" / "r.yaml"
    path.parent.mkdir()
    path.write_text(
        head + "quantize:\n  algorithm: max\n  quant_cfg:\n"
        "  - {quantizer_name: '*', enable: false}\n  - $import: all\n"
        "  - {quantizer_name: '*', parent_class: nn.Embedding, enable: false}\n"
    )
    problems = RecipeProblems("x")
    recipe = load_recipe(path)
    found = match_rules(recipe, tiny_models.modules(llama), problems)
    assert {d.label for d in found.decisions if d.module.kind == "linear"} == {"FP8"}
    path.write_text(path.read_text().replace("units/all", "units/round"))
    with pytest.raises(RecipeError, match="is circular"):
        load_recipe(path)
