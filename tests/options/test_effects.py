"""Conditions of options on each other: what has no effect, what excludes what, and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from megtool.errors import UsageError
from megtool.options.effects import (
    at_most,
    check_effects,
    check_excludes,
    excludes,
    needs_also,
    requires,
    unused_with,
)
from megtool.options.field import Options, option


@dataclass(frozen=True, kw_only=True)
class Kitchen(Options):
    """Cook."""

    rivals: ClassVar = (("gas", "induction"),)

    gas: bool | None = option("Heat", "Gas.")
    induction: bool | None = option("Heat", "Induction.", needs=excludes({"pan=copper": "no iron"}))
    pan: Literal["iron", "copper"] = option("Heat", "Pan.", "iron")
    heat: float = option("Heat", "Heat.", 0.5, above=0, maximum=1)
    lowest: float = option(
        "Heat", "Lowest.", 0.0, minimum=0, below=1, needs=(at_most("lowest", "heat"),)
    )
    sauce: Literal["none", "red", "white"] = option(
        "Food",
        "Sauce.",
        "none",
        needs=(
            requires(("tomatoes", "paste"), values=("red",)),
            needs_also("milk", "white"),
            *unused_with({"fast": "which has none"}),
        ),
    )
    tomatoes: int | None = option("Food", "Tomatoes.")
    paste: bool = option("Food", "Paste.", True)
    milk: int = option("Food", "Milk.", 0)
    fast: bool = option("Food", "Fast.", False, needs=unused_with({"sauce=white": "slow"}, True))


@pytest.mark.parametrize(
    ("values", "message", "error_id"),
    [
        ({"gas": True, "induction": True}, "--gas and --induction exclude each other", "usage"),
        ({"induction": True, "pan": "copper"}, "--pan copper exclude each other: no iron", "usage"),
        ({"lowest": 0.75}, "--lowest is above --heat", "usage"),
        (
            {"sauce": "red", "paste": False},
            "--sauce red has no effect without --tomatoes or --paste",
            "option-without-effect",
        ),
        ({"sauce": "white"}, "--sauce white needs --milk", "usage"),
        (
            {"sauce": "red", "tomatoes": 1, "fast": True},
            "--sauce has no effect with --fast, which has none",
            "option-without-effect",
        ),
    ],
)
def test_conditions_are_checked(values: dict[str, Any], message: str, error_id: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_effects(Kitchen(**values))
    assert message in caught.value.message
    assert caught.value.id == error_id
    assert caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        {"gas": True, "induction": False},
        {"gas": True, "pan": "copper"},
        {"sauce": "red", "tomatoes": 0},
        {"sauce": "white", "milk": 1},
        {"fast": True},
        {"lowest": 0.25},
    ],
)
def test_what_goes_together_is_taken(values: dict[str, Any]) -> None:
    check_effects(Kitchen(**values))


def test_what_a_feature_excludes_is_refused() -> None:
    kitchen = Kitchen(pan="copper")
    check_excludes(kitchen, "the oven", {"pan=iron": "", "fast": ""})
    with pytest.raises(UsageError, match="the oven and --pan copper exclude each other"):
        check_excludes(kitchen, "the oven", {"pan=copper": ""})


@pytest.mark.parametrize("heat", [0.0, -1.0, 1.5])
def test_a_range_has_ends(heat: float) -> None:
    Kitchen(heat=1.0)
    with pytest.raises(UsageError, match="--heat is") as caught:
        Kitchen(heat=heat)
    assert caught.value.hint == "above 0 and at most 1"


@pytest.mark.parametrize("lowest", [-0.5, 1.0])
def test_a_range_may_exclude_its_end(lowest: float) -> None:
    Kitchen(lowest=0.0)
    with pytest.raises(UsageError, match="--lowest is") as caught:
        Kitchen(lowest=lowest)
    assert caught.value.hint == "0 or more and below 1"
