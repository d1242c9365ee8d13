"""The best options within a budget, against every choice there is."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import CalibrationError, UsageError
from megtool.quant.mixed_precision.knapsack import (
    FormatOption,
    KnapsackItem,
    curve,
    select,
    smallest,
)
from tests.support.limits import is_within

OPTION = st.tuples(st.integers(1, 60), st.integers(0, 500).map(lambda n: n / 100))


def items_of(raw: list[list[tuple[int, float]]]) -> list[KnapsackItem]:
    return [
        KnapsackItem(
            name=f"unit {i}",
            options=tuple(
                FormatOption(name=f"option {j}", num_bytes=size, loss=loss)
                for j, (size, loss) in enumerate(options)
            ),
        )
        for i, options in enumerate(raw)
    ]


def best_of_all(items: list[KnapsackItem], budget: int) -> tuple[float, int] | None:
    totals = (
        (sum(o.loss for o in chosen), sum(o.num_bytes for o in chosen))
        for chosen in itertools.product(*(i.options for i in items))
    )
    return min((t for t in totals if t[1] <= budget), default=None)


def like_a_model(layers: int, seed: int = 0) -> list[KnapsackItem]:
    """Four units a layer, three formats each; losses over several powers of ten."""
    rng = np.random.default_rng(seed)
    sizes = [18_874_368, 12_582_912, 67_108_864, 33_554_432]
    raw = []
    for _ in range(layers):
        for size in sizes:
            four = float(rng.lognormal(-4, 1.5))
            eight = four / float(rng.uniform(20, 300))
            raw.append(
                [(size * 9 // 16 + 8, four), (size + 8, eight), (size * 2, 0.0)],
            )
    return items_of(raw)


@given(st.lists(st.lists(OPTION, min_size=1, max_size=4), max_size=6), st.integers(0, 250))
@settings(max_examples=300, deadline=None)
def test_no_choice_is_better(raw: list[list[tuple[int, float]]], budget: int) -> None:
    items = items_of(raw)
    expected = best_of_all(items, budget)
    if expected is None:
        with pytest.raises(UsageError, match=f"{smallest(items)} bytes of the smallest choice"):
            select(items, budget)
        return
    found = select(items, budget)
    assert found.loss == pytest.approx(expected[0], abs=1e-9)
    assert found.num_bytes <= budget
    assert found.bound == pytest.approx(found.loss, abs=1e-9)
    assert len(found.picks) == len(items)
    chosen = [item.options[p] for item, p in zip(items, found.picks, strict=True)]
    assert sum(o.num_bytes for o in chosen) == found.num_bytes


@given(st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_points_of_the_curve_are_the_best_of_their_size(
    raw: list[list[tuple[int, float]]],
) -> None:
    items = items_of(raw)
    points = curve(items)
    assert points[0].num_bytes == smallest(items)
    for point in points:
        expected = best_of_all(items, point.num_bytes)
        assert expected is not None
        assert point.loss == pytest.approx(expected[0], abs=1e-9)
    assert points[-1].loss == pytest.approx(
        sum(min(o.loss for o in i.options) for i in items), abs=1e-9
    )
    sizes, losses = [p.num_bytes for p in points], [p.loss for p in points]
    assert sizes == sorted(set(sizes))
    assert losses == sorted(losses, reverse=True)


def test_a_large_model_is_decided_exactly_and_soon() -> None:
    items = like_a_model(64)
    whole, least = sum(i.options[-1].num_bytes for i in items), smallest(items)
    begin = time.process_time()
    losses = []
    for share in (0.01, 0.2, 0.5, 0.9):
        found = select(items, int(least + share * (whole - least)))
        assert found.bound == found.loss, "proved"
        losses.append(found.loss)
    assert losses == sorted(losses, reverse=True)
    assert is_within(time.process_time() - begin, 20)


def test_few_states_give_a_choice_near_the_best_and_say_so() -> None:
    items = like_a_model(24, seed=3)
    budget = int(1.3 * smallest(items)) + 12345
    exact = select(items, budget)
    near = select(items, budget, most_states=4)
    assert exact.loss <= near.loss <= 1.02 * exact.loss
    assert near.bound <= exact.loss
    assert near.num_bytes <= budget


def test_the_same_items_give_the_same_choice() -> None:
    options = (
        FormatOption(name="a", num_bytes=1, loss=1.0),
        FormatOption(name="b", num_bytes=2, loss=0.5),
    )
    items = [KnapsackItem(name=str(i), options=options) for i in range(8)]
    found = select(items, 11)
    assert found == select(items, 11)
    assert (found.num_bytes, found.loss) == (11, 6.5)


def test_a_loss_that_is_no_number() -> None:
    items = items_of([[(1, float("nan"))]])
    with pytest.raises(CalibrationError, match="the sensitivity of unit 0 in option 0 is nan"):
        select(items, 5)
    with pytest.raises(CalibrationError):
        curve(items)
