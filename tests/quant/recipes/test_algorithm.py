"""Algorithms: ranges of options, and methods that would do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.errors import RecipeError
from megtool.quant.algorithms.algorithm_config import resolve_algorithm
from megtool.quant.recipes.dialects import parse_recipe
from megtool.quant.recipes.located_yaml import read_documents
from megtool.quant.recipes.recipe import Recipe
from tests.support.errors import raises
from tests.support.quant.recipe_texts import recipe_from

EVERY = {"kind": "linear"}


def recipe(algorithm: Any, *formats: dict[str, Any]) -> Recipe:
    """A recipe with an algorithm (None: none) and formats named a, b and so on."""
    named = dict(zip("abc", formats, strict=False))
    rules = [{"match": EVERY, "format": name, "optional": True} for name in named]
    data: dict[str, Any] = {"description": "d", "formats": named, "rules": rules}
    return recipe_from(data if algorithm is None else data | {"algorithm": algorithm})


INT4, FP8, NVFP4, MXFP8, MXFP4, KV = (
    {"algo": "W4A16_AWQ"},
    {"algo": "FP8"},
    {"algo": "NVFP4"},
    {"algo": "MXFP8"},
    {"algo": "MXFP4"},
    {"kv_algo": "FP8"},
)
AUTO = {"choose": ["a", "keep"], "bits": 6}


@pytest.mark.parametrize(
    ("method", "option", "wrong", "right"),
    [
        ("awq", "alpha_step", [0, 9, -0.1, 1e-9], [1, 0.05]),
        ("smoothquant", "alpha", [5, -0.1, True], [0, 1, 0.5]),
        ("smoothquant", "fold", ["yes", 1], [True, False]),
        ("smoothquant", "robust", ["yes", 1], [True, False]),
        ("gptq", "refinements", [-3, 101, 1.5], [0, 2]),
        ("gptq", "damping", [-1], [0, 0.01]),
        ("gptq", "shrinkage", [7, -0.2], [0.3]),
        ("gptq", "normalize_tokens", ["yes", 1], [True, False]),
        ("percentile", "percentile", [150, -3, 0, "x"], [99.9, 100]),
    ],
)
def test_options_have_ranges(method: str, option: str, wrong: list[Any], right: list[Any]) -> None:
    found = {"awq": NVFP4, "smoothquant": NVFP4, "gptq": INT4, "percentile": FP8}[method]
    for value in right:
        recipe({"method": method, option: value}, found)
    for value in [*wrong, float("nan"), float("inf")]:
        with raises(RecipeError, hint=True) as caught:
            recipe({"method": method, option: value}, found)
        assert caught.value.message == f"{option} is {value!r}"


def test_every_option_is_told_with_its_line() -> None:
    text = b"""description: d
algorithm:
  method: gptq
  damping: .nan
  shrinkage: 7
  clipp: true
formats: {a: {algo: W4A16_AWQ}}
rules: [{match: {kind: linear}, format: a}]
"""
    (node,) = read_documents(text, file="x")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(node, name="x", file="x")
    told = str(caught.value)
    assert "line 4: damping is nan (a number from 0 to 100)" in told
    assert "line 5: shrinkage is 7 (a number from 0 to 1)" in told
    assert "line 6: unknown option 'clipp' of gptq (did you mean 'clip'?)" in told


@pytest.mark.parametrize(
    ("algorithm", "formats", "told"),
    [
        ("gptq", [FP8], "gptq does nothing to format 'a' (FP8)"),
        ("gptq", [MXFP8], "gptq does nothing to format 'a' (MXFP8)"),
        (
            {"method": "gptq", "four_over_six": True},
            [MXFP4, INT4],
            "four_over_six does nothing: no format has weights in NVFP4",
        ),
        (
            {"method": "mse", "scale_search": True},
            [MXFP8, FP8],
            "scale_search does nothing: no format has weights in NVFP4 or MXFP4",
        ),
        (
            {"method": "none", "cast": True},
            [MXFP4],
            "cast does nothing: no format has weights in NVFP4",
        ),
        (
            {"method": "max", "cast": True, "scale_search": True},
            [NVFP4],
            "cast leaves no scale to search",
        ),
        (
            {"method": "gptq", "clip": True, "learned_rounding": True},
            [FP8],
            "learned_rounding does nothing: no format has codes to choose",
        ),
        ({"method": "gptq", "steps": 50}, [MXFP4], "steps does nothing without learned_rounding"),
        (
            {"method": "awq", "learned_rounding": False, "learning_rate": 0.1},
            [NVFP4],
            "learning_rate does nothing without learned_rounding",
        ),
        ("none", [FP8], "none does nothing to format 'a' (FP8)"),
        ("awq", [INT4, FP8], "awq does nothing to format 'b' (FP8)"),
        ("smoothquant", [MXFP8], "smoothquant does nothing to format 'a' (MXFP8)"),
        ("percentile", [INT4], "percentile does nothing to format 'a' (W4A16_AWQ)"),
        ("max", [FP8 | {"algorithm": "kl_div"}], "kl_div does nothing to format 'a' (FP8)"),
        ("kl_div", [FP8], "kl_div is for formats that choose, and there are none"),
        ("awq", [KV], "awq does nothing to a KV cache, and there are no other formats"),
        ("none", [INT4, KV], "format 'b' is scaled by data, and algorithm none takes none"),
        ("max", [FP8, KV | {"algorithm": "entropy"}], "entropy does nothing to format 'b'"),
        ("kl_div", [FP8, AUTO | {"algorithm": "awq"}], "awq does not choose formats"),
    ],
)
def test_methods_that_would_do_nothing(
    algorithm: Any, formats: list[dict[str, Any]], told: str
) -> None:
    with raises(RecipeError, hint=True) as caught:
        recipe(algorithm, *formats)
    assert caught.value.message.startswith(told)


@pytest.mark.parametrize(
    ("algorithm", "formats"),
    [
        ({"method": "awq", "clip": True}, [FP8]),
        ({"method": "awq", "gptq": True}, [{"algo": "W8A16"}]),
        ({"method": "gptq", "clip": True}, [FP8]),
        ({"method": "gptq", "four_over_six": False}, [INT4]),
        ({"method": "gptq", "scale_search": True}, [INT4, MXFP4]),
        ({"method": "none", "four_over_six": True}, [{"algo": "W4A16_NVFP4"}]),
        ("gptq", [NVFP4]),
        ("awq", [INT4, FP8 | {"algorithm": "max"}, KV]),
        ("none", [INT4, KV | {"constant": True}]),
        ("mse", [MXFP8, FP8]),
        ("gradient", [FP8, AUTO, NVFP4 | {"algorithm": "awq"}]),
    ],
)
def test_methods_that_do_something(algorithm: Any, formats: list[dict[str, Any]]) -> None:
    recipe(algorithm, *formats)


@pytest.mark.parametrize(
    ("formats", "method"),
    [([INT4], "none"), ([INT4, FP8], "max"), ([KV], "max"), ([INT4, AUTO], "kl_div")],
)
def test_a_recipe_without_an_algorithm(formats: list[dict[str, Any]], method: str) -> None:
    assert recipe(None, *formats).method == method


@pytest.mark.parametrize("method", ["none", "max", "mse"])
def test_a_search_of_scales_without_data(method: str) -> None:
    found = recipe({"method": method, "four_over_six": True}, {"algo": "W4A16_NVFP4"})
    config = resolve_algorithm(found, found.formats["a"])
    assert config.four_over_six
    assert config.mse
    assert config.input_observer == ("mse" if method == "mse" else "max")
    plain = recipe({"method": "none", "four_over_six": False}, {"algo": "W4A16_NVFP4"})
    assert not resolve_algorithm(plain, plain.formats["a"]).mse


def test_fold_holds_for_formats_with_a_method_of_their_own() -> None:
    found = recipe({"method": "awq", "fold": True}, NVFP4, INT4 | {"algorithm": "smoothquant"})
    assert resolve_algorithm(found, found.formats["a"]).fold
    assert resolve_algorithm(found, found.formats["b"]).fold
