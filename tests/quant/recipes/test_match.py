"""A recipe against a model: who decides, what that weighs, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import load_recipe, parse_recipe
from megtool.quant.recipes.formats import FORMATS
from megtool.quant.recipes.located_yaml import read_documents
from megtool.quant.recipes.match import MatchResult, match_rules
from megtool.quant.recipes.rules import RecipeProblems
from tests.support.models import tiny_models


def against(text: str, path: Path, **options: int) -> MatchResult:
    problems = RecipeProblems("x.yaml")
    (node,) = read_documents(text.encode(), file="x.yaml")
    recipe = parse_recipe(node, name="x", file="x.yaml", problems=problems)
    matched = match_rules(recipe, tiny_models.modules(path), problems, **options)
    problems.raise_all()
    return matched


def labels(matched: MatchResult) -> dict[str, str]:
    return {d.module.name: d.label for d in matched.decisions}


FIRST = """description: the first that matches decides
formats:
  fp8: {algo: FP8}
  int4: {algo: W4A16_AWQ, group_size: 64}
rules:
  - match: {exact: layers.1.attn.q}
    format: keep
    reason: it is delicate
  - match: {layers: 1, kind: linear}
    format: fp8
  - match: {role: [qkv, proj, fc1, fc2]}
    format: int4
"""


def test_the_first_rule_that_matches_decides(llama: Path) -> None:
    matched = against(FIRST, llama)
    found = labels(matched)
    assert found["layers.1.attn.q"] == "keep"
    assert found["layers.1.attn.k"] == found["layers.1.mlp.up"] == "FP8"
    assert found["layers.0.attn.q"] == "W4A16_AWQ"
    assert found["embed"] == found["norm"] == found["layers.0.attn.kv"] == "keep"
    by_name = {d.module.name: d for d in matched.decisions}
    assert by_name["layers.1.attn.q"].reason == "it is delicate"
    assert by_name["layers.1.attn.q"].rules == (0,)
    assert by_name["embed"].reason == "no rule matches"
    assert matched.matches == (1, 7, 28)
    assert matched.decides == (1, 6, 21)


def test_all_problems_are_told_at_once_with_their_lines(llama: Path) -> None:
    text = """description: many faults
algorithms: max
formats:
  fp8: {algo: FPP8}
  spare: {algo: FP8}
  int4: {algo: W4A16_AWQ, group_size: 48}
rules:
  - match: {role: qkv}
    format: fp9
  - match: {role: qvk}
    format: fp8
  - match: {glob: "layers.*.attn.q"}
    format: int4
  - match: {exact: layers.9.attn.q}
    format: int4
"""
    with pytest.raises(RecipeError) as caught:
        against(text, llama)
    told = str(caught.value)
    assert caught.value.exit_status == 4
    for line in (
        "line 2: unknown key 'algorithms' of a recipe (did you mean 'algorithm'?)",
        "line 4: unknown algo 'FPP8' (did you mean 'FP8'",
        "line 5: format 'spare' is used by no rule",
        "line 6: group_size is 48 (one of 32, 64, 128, 256)",
        "line 9: unknown format 'fp9' (did you mean 'fp8'?)",
        "line 10: unknown role 'qvk' (did you mean 'qkv'?)",
        "line 12: 'name like layers.*.attn.q' decides nothing: all 4 modules",
        "by 'role qkv'",
        "line 14: 'name is layers.9.attn.q' matches nothing",
    ):
        assert line in told


def test_optional_rules_may_have_no_effect(llama: Path) -> None:
    rules = "rules:\n  - match: {role: qkv}\n    format: f\n"
    for more in ("{role: router}", '{glob: "*.attn.q"}'):
        rule = f"  - match: {more}\n    format: keep\n"
        text = "description: d\nformats: {f: {algo: FP8}}\n" + rules + rule
        with pytest.raises(RecipeError):
            against(text, llama)
        against(text + "    optional: true\n", llama)


@pytest.mark.parametrize("kind", ["norm", "kv_cache"])
def test_a_format_that_does_not_suit_a_module(llama: Path, kind: str) -> None:
    text = "description: d\nformats: {f: {algo: FP8}}\nrules:\n"
    text += f"- match: {{kind: {kind}}}\n  format: f\n"
    with pytest.raises(RecipeError, match="gives FP8 to layers"):
        against(text, llama)


SMALL = {"hidden_size": 72, "intermediate_size": 192, "head_dim": 36, "vocab_size": 64}
INT4 = """description: d
formats:
  g: {algo: W4A16_AWQ}
rules:
- match: {role: [qkv, fc2]}
  format: g
"""


def test_the_error_names_the_largest_group_that_divides(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", **(SMALL | {"hidden_size": 576}))
    with pytest.raises(RecipeError) as caught:
        against(INT4, path)
    assert "line 3: group size 128 of W4A16_AWQ does not divide the 576 columns" in str(
        caught.value
    )
    assert " and 15 more" in str(caught.value)
    assert "the largest that does is 64" in str(caught.value)
    matched = against(INT4, path, group_size=64)
    assert {d.format.group_size for d in matched.decisions if d.format} == {64}
    with pytest.raises(RecipeError) as caught:
        against(INT4, path, group_size=48)
    assert caught.value.message == "no format of this recipe takes groups of 48"
    with pytest.raises(RecipeError, match="none has a choice"):
        against(INT4.replace("W4A16_AWQ", "FP8"), path, group_size=64)


def test_groups_of_formats_to_choose_from_are_asked_for(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", **SMALL)
    chosen = INT4.replace("format: g", "format: auto").replace(
        "rules:", "  fp4: {algo: NVFP4}\n  auto: {choose: [g, fp4, keep], bits: 9}\nrules:"
    )
    for size in (16, 32, 64):
        assert against(chosen, path, group_size=size).decisions
    with pytest.raises(RecipeError, match="takes groups of 48") as caught:
        against(chosen, path, group_size=48)
    assert "one of 32, 64, 128, 256" in str(caught.value)


def test_no_group_divides(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", **SMALL)
    with pytest.raises(RecipeError, match="keep them unquantized with a separate rule"):
        against(INT4, path)
    with pytest.raises(RecipeError, match=r"does not divide the .* columns") as caught:
        against(INT4, path)
    assert caught.value.hint == "keep them unquantized with a separate rule, or use another format"


def test_blocks_may_be_cut(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m", **SMALL)
    blocks = INT4.replace("W4A16_AWQ", "FP8_PB_WO")
    decisions = against(blocks, path).decisions
    cut = [d for d in decisions if d.format and any(n % 128 for n in d.module.shape)]
    assert cut
    for d in cut:
        assert d.format is not None
        rows, columns = d.module.shape
        size = d.format.number.num_bytes(d.module.shape, d.format.group_size)
        assert size == rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


NAMED = """description: names and layers
formats: {f: {algo: FP8}}
rules:
- match: {exact: [layers.0.attn.q, layers.77.attn.q]}
  format: f
- match: {layers: "1-9, -5, 2", role: proj}
  format: f
- match: {all: [{role: fc1}, {not: {glob: ["*.3.*", "*.33.*"]}}]}
  format: f
- match: {regex: ["layers.0.mlp.down", "layer.0.mlp.down"]}
  format: keep
- match: {role: fcc}
"""


def test_every_name_and_layer_of_a_list_is_in_the_model(llama: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        against(NAMED, llama)
    told = str(caught.value)
    for line in (
        "line 4: the name layers.77.attn.q of 'name is layers.0.attn.q or layers.77.attn.q'",
        "(did you mean 'layers.",
        "line 6: layers 1-9 of",
        "line 6: layers -5 of",
        "(the model has layers 0 to 3)",
        "line 8: name like *.33.* of",
        "line 10: name matches layer.0.mlp.down of",
        "line 12: a rule needs match and format",
        "line 12: unknown role 'fcc'",
    ):
        assert line in told
    assert told.count("line 6:") == 2
    for good in ("2", "1-3", "-1", ":9", "-9:"):
        against(NAMED[: NAMED.index("- match: {exact")] + LAYERED.format(good), llama)
    dangling = NAMED[: NAMED.index("- match: {layers")] + "  optional: true\n"
    against(dangling, llama)


LAYERED = """- match: {{layers: "{}", role: proj}}
  format: f
"""


def test_what_calibration_does_not_see_has_no_calibrated_inputs(llama: Path) -> None:
    text = "description: d\nformats: {f: {algo: FP8}}\nrules:\n- match: {kind: embedding}\n"
    with pytest.raises(RecipeError, match="gives FP8 to embed, an embedding"):
        against(text + "  format: f\n", llama)
    against(text.replace("FP8}", "W8A16}") + "  format: f\n", llama)


@pytest.mark.parametrize(
    ("algo", "group", "wanted"),
    [
        ("FP8", 0, 256 * 512 + 4 + 4),
        ("FP8_PER_CHANNEL_PER_TOKEN", 0, 256 * 512 + 256 * 4),
        ("FP8_PB_WO", 128, 256 * 512 + 2 * 4 * 4),
        ("W8A8_SQ_PER_CHANNEL", 0, 256 * 512 + 256 * 4 + 4),
        ("W8A16", 0, 256 * 512 + 256 * 4),
        ("W4A16_AWQ", 128, 128 * 512 + 256 * 4 * 4),
        ("W4A8_AWQ", 128, 128 * 512 + 256 * 4 * 4 + 8),
        ("MXFP8", 32, 256 * 512 + 256 * 16),
        ("MXFP4", 32, 256 * 256 + 256 * 16),
        ("W4A8_MXFP4_FP8", 32, 256 * 256 + 256 * 16),
        ("NVFP4", 16, 256 * 256 + 256 * 32 + 8),
        ("W4A16_NVFP4", 16, 256 * 256 + 256 * 32 + 4),
        ("W4A8_NVFP4_FP8", 32, 256 * 256 + 256 * 16 + 8),
    ],
)
def test_bytes_of_every_format(algo: str, group: int, wanted: int) -> None:
    assert FORMATS[algo].num_bytes((256, 512), group) == wanted


def test_factors_of_columns_are_stored_where_no_norm_takes_them(llama: Path) -> None:
    modules = {m.name: m for m in tiny_models.modules(llama)}
    recipe = load_recipe("int4_awq")
    matched = match_rules(recipe, tuple(modules.values()), RecipeProblems("x"))
    found = {d.module.name: d.num_bytes for d in matched.decisions}
    assert found["layers.0.attn.q"] == 128 * 128 // 2 + 128 * 4
    assert found["layers.0.attn.o"] == 128 * 128 // 2 + 128 * 4 + 128 * 2


def test_every_format_of_the_table_is_known_by_its_name() -> None:
    assert {f.algo for f in FORMATS.values()} == set(FORMATS)
