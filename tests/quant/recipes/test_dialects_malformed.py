"""Recipes with any value in any place: understood, or refused by name, in every dialect."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import RecipeError
from megtool.quant.recipes.dialects import read_recipe_text
from megtool.quant.recipes.match import match_rules
from megtool.quant.recipes.modules import ModuleInfo
from megtool.quant.recipes.rules import RecipeProblems
from tests.support.models import tiny_models
from tests.support.quant.recipe_texts import COMPRESSED, FP8, MEGATRON, OFF, both, recipe_from

INT4 = {"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}
MODELOPT = {
    "metadata": {"description": "d", "recipe_type": "ptq"},
    "quantize": {
        "algorithm": {"method": "awq_lite"},
        "quant_cfg": [
            OFF,
            *both("*", FP8),
            {"quantizer_name": "*down*weight_quantizer", "cfg": [INT4, FP8]},
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8},
            {"quantizer_name": "*", "parent_class": "nn.Embedding", "enable": False},
        ],
    },
}
AUTO = {
    "auto_quantize": {
        "constraints": {"effective_bits": 6.0},
        "candidate_formats": [{"quant_cfg": [OFF, *both("*proj.", FP8)], "algorithm": "max"}],
        "disabled_layers": ["*lm_head*"],
    }
}
BASES = {
    "ours": yaml.safe_load(read_recipe_text("mixed_nvfp4_fp8")[1]),
    "automatic": yaml.safe_load(read_recipe_text("auto_nvfp4_fp8")[1]),
    "megatron": MEGATRON,
    "modelopt": MODELOPT,
    "modelopt's automatic": AUTO,
    "compressed-tensors": COMPRESSED,
}
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-200, 200),
    st.floats(),
    st.sampled_from(["*", "fp8", "keep", "0-3", "re:(", "re:.*", "Linear", "", "group", "$import"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["glob", "a", "cfg", "-1", "num_bits"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    if not isinstance(value, dict | list):
        return []
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found += [(*at, key), *places(item, (*at, key))]
    return found


@pytest.fixture(scope="module")
def known(llama: Path) -> tuple[ModuleInfo, ...]:
    return tiny_models.modules(llama)


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_value_anywhere(base: str, known: tuple[ModuleInfo, ...], data: st.DataObject) -> None:
    recipe = copy.deepcopy(BASES[base])
    *way, last = data.draw(st.sampled_from(places(recipe)))
    held = recipe
    for step in way:
        held = held[step]
    held[last] = data.draw(VALUES)
    problems = RecipeProblems("x")
    try:
        match_rules(recipe_from(recipe), known, problems)
        problems.raise_all()
    except RecipeError as e:
        assert e.message


@pytest.mark.parametrize("base", BASES)
def test_the_whole_ones_are_understood(base: str, known: tuple[ModuleInfo, ...]) -> None:
    problems = RecipeProblems("x")
    match_rules(recipe_from(BASES[base]), known, problems)
    problems.raise_all()
