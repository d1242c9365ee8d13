"""`megtool recipe`: what it prints, what it refuses, and that no layout changes what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool import explain_recipe, list_recipes, reshard, show_recipe
from megtool.cli.app import main
from megtool.errors import LayoutError, MappingError, RecipeError
from tests.support.errors import raises
from tests.support.models import tiny_llama, tiny_models


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.moe(tmp_path_factory.mktemp("recipe") / "moe")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("recipe") / "llama")


def decided(path: Path, recipe: str | Path) -> dict[str, Any]:
    """The report without what says where the model is."""
    report = explain_recipe(path, recipe).to_json()
    return {k: v for k, v in report.items() if k not in ("path", "format")}


LAYERS = """description: a rule for one layer, by its number in the whole model
formats:
  fp8: {algo: FP8}
  nvfp4: {algo: NVFP4}
rules:
  - match: {layers: "2", kind: linear, not: {role: router}}
    format: fp8
  - match: {regex: 'layers\\.\\d+\\.mlp\\.experts\\.[13]\\..*'}
    format: nvfp4
  - match: {glob: "*"}
    format: keep
"""


@settings(max_examples=5)
@given(
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    to=st.sampled_from(["torch_dist", "megatron"]),
)
def test_a_recipe_means_the_same_at_every_layout(
    tp: int, pp: int, ep: int, to: str, moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layers.yaml").write_text(LAYERS)
    try:
        reshard(moe, folder / "out", to=to, tp=tp, pp=pp, ep=ep)
    except LayoutError:
        return
    for recipe in ("mixed_nvfp4_fp8", folder / "layers.yaml"):
        assert decided(folder / "out", recipe) == decided(moe, recipe)


def test_layers_are_counted_over_the_whole_model(moe: Path, tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(LAYERS)
    reshard(moe, tmp_path / "out", to="torch_dist", tp=2, pp=4, ep=2)
    report = explain_recipe(tmp_path / "out", tmp_path / "layers.yaml")
    first, second, _ = report.rules
    assert first.modules[:2] == ("layers.2.attn.q", "layers.2.attn.k")
    assert first.decides == 4 + 4 * 3
    assert second.decides == 2 * 2 * 3
    assert all(".2." not in n or ".experts.2." in n for n in second.modules)


def test_explain_prints_rules_modules_and_sums(llama: Path, capsys: Any) -> None:
    assert main(["recipe", "explain", str(llama), "--recipe", "fp8", "--target", "vllm"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "by recipe fp8",
        "the first rule that matches decides",
        "vllm loads it",
        "role embedding",
        "layers.{0-3}.attn.q",
        "bits per weight",
        "total",
    ):
        assert text in shown


def test_json_holds_every_module_and_rule(llama: Path, capsys: Any) -> None:
    assert main(["recipe", "explain", str(llama), "--recipe", "kv_fp8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "kv_fp8"
    assert report["kv_bytes"] * 2 == report["kv_source_bytes"]
    caches = next(m for m in report["modules"] if m["kind"] == "kv_cache")
    assert (caches["name"], caches["count"], caches["format"]) == (
        "layers.{0-3}.attn.kv",
        4,
        "KV FP8",
    )
    rule = next(r for r in report["rules"] if r["format"] == "KV FP8")
    assert rule["modules"] == [f"layers.{n}.attn.kv" for n in range(4)]


def test_show_prints_a_file_that_is_a_recipe(capsys: Any, tmp_path: Path) -> None:
    assert main(["recipe", "show", "int4_awq"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(shown)
    assert show_recipe(tmp_path / "mine.yaml").recipe.rules == show_recipe("int4_awq").recipe.rules
    assert main(["recipe", "show", "int4_awq", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["formats"]["int4"]["quant_algo"] == "W4A16_AWQ"
    assert report["text"] == shown


def test_list_has_a_line_each(capsys: Any) -> None:
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(list_recipes().recipes)
    assert main(["recipe", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["recipes"]) == len(lines) - 1


@pytest.mark.parametrize("verb", ["list", "show", "explain"])
def test_every_command_has_an_example(verb: str, capsys: Any) -> None:
    assert main(["recipe", verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for text in (f"Example: megtool recipe {verb}", "--json", "--quiet", "--verbose"):
        assert text in shown


def test_errors_are_status_4_and_name_what_is_near(
    llama: Path, capsys: Any, tmp_path: Path
) -> None:
    assert main(["recipe", "explain", str(llama), "--recipe", "int4_awk"]) == 4
    assert "did you mean 'int4_awq'" in capsys.readouterr().err
    assert main(["recipe", "explain", str(llama), "--recipe", "fp8", "--target", "vlm"]) == 2
    assert main(["recipe", "explain", str(tmp_path / "none"), "--recipe", "fp8"]) == 3
    (tmp_path / "bad.yaml").write_text("rules: [\n")
    assert main(["recipe", "show", str(tmp_path / "bad.yaml")]) == 4
    assert "line 2: the YAML is invalid" in capsys.readouterr().err


def test_a_group_that_does_not_divide_and_one_that_does(tmp_path: Path, capsys: Any) -> None:
    source = tiny_models.llama(tmp_path / "m", hidden_size=576)
    with pytest.raises(RecipeError, match="the largest that does is 64"):
        explain_recipe(source, "int4_awq")
    assert (
        main(["recipe", "explain", str(source), "--recipe", "int4_awq", "--group-size", "64"]) == 0
    )
    assert "4.5" in capsys.readouterr().out


def test_a_checkpoint_of_no_known_model(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "m")
    (source / "config.json").unlink()
    with raises(MappingError, id="no-model-config") as caught:
        explain_recipe(source, "fp8")
    assert "--like" in str(caught.value)


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    source = tiny_models.llama(tmp_path / "m", tie_word_embeddings=True)
    assert "head" not in {m.name for m in explain_recipe(source, "nvfp4").modules}


@pytest.mark.parametrize(("recipe", "number"), [("w4a16_nvfp4", 2), ("int8_weight_only", 1)])
def test_advice_names_its_source(recipe: str, number: int, tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "model", hidden_size=128, intermediate_size=128)
    report = explain_recipe(source, recipe)
    assert len(report.notes) == number
    assert all("https://github.com/" in note for note in report.notes)
    assert not explain_recipe(source, "fp8").notes
