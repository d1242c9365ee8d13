"""The `rotation` of a recipe: what it may say, and what is refused with its line."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.errors import RecipeError
from megtool.quant.recipes.rotation import RotationMatrices
from tests.support.errors import raises
from tests.support.quant.recipe_texts import recipe_from

PLAIN: dict[str, Any] = {
    "description": "d",
    "formats": {"a": {"algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
    "rules": [{"match": {"kind": "linear"}, "format": "a"}],
}


def read(rotation: Any) -> RotationMatrices | None:
    return recipe_from(PLAIN | {"rotation": rotation}).rotation


def test_what_it_says() -> None:
    assert recipe_from(PLAIN).rotation is None
    both = read({"r1": "random-hadamard", "r2": "hadamard", "block_size": 64, "seed": 7})
    assert both is not None
    assert both.describe() == "R1 random-hadamard in blocks of 64, R2 hadamard, seed 7"
    assert both.to_json() == {
        **{"r1": "random-hadamard", "r2": "hadamard", "block_size": 64, "seed": 7}
    }
    one = read({"r2": "hadamard"})
    assert one is not None
    assert one.describe() == "R2 hadamard"


@pytest.mark.parametrize(
    ("rotation", "fact", "hint"),
    [
        ("hadamard", "rotation is 'hadamard'", "r1: hadamard"),
        ([], "rotation is []", "r1: hadamard"),
        ({}, "r1 or r2", "random-matrix"),
        ({"seed": 1}, "r1 or r2", "random-matrix"),
        ({"r1": "hadamar"}, "r1 is 'hadamar'", "'hadamard'"),
        ({"r2": True}, "r2 is True", "known"),
        ({"r1": "hadamard", "r3": "hadamard"}, "r3 is an online rotation", "engine"),
        ({"r1": "hadamard", "sead": 1}, "unknown key 'sead'", "'seed'"),
        ({"r1": "hadamard", "seed": -1}, "seed is -1", "0"),
        ({"r1": "hadamard", "seed": 1.5}, "seed is 1.5", "0"),
        ({"r1": "hadamard", "seed": True}, "seed is True", "0"),
        ({"r1": "hadamard", "block_size": 1}, "block_size is 1", "2"),
        ({"r1": "hadamard", "block_size": "x"}, "block_size is 'x'", "2"),
        ({"r2": "hadamard", "block_size": 64}, "block_size is that of r1", "r1"),
    ],
)
def test_what_is_refused(rotation: Any, fact: str, hint: str) -> None:
    with raises(RecipeError, fact, hint=hint):
        read(rotation)
