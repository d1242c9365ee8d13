"""What a low-rank update adds to a weight: exact sums, the same bits for any cut, refusals."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError, MappingError
from megtool.transport.weight_update import UpdateAdder, WeightUpdate
from tests.support.errors import raises


def make_update(
    shape: tuple[int, int], rank: int, *, scale: float = 2.0, kind: Any = torch.float32
) -> WeightUpdate:
    generator = torch.Generator().manual_seed(rank)
    up = torch.randn(shape[0], rank, generator=generator)
    down = torch.randn(rank, shape[1], generator=generator)
    return WeightUpdate(down.to(kind), up.to(kind), scale)


def merged(
    updates: WeightUpdate | list[WeightUpdate], weight: np.ndarray, cuts: list[int]
) -> np.ndarray:
    """The weight with its updates added in the ranges between `cuts`."""
    out = weight.copy().reshape(-1)
    updates = [updates] if isinstance(updates, WeightUpdate) else updates
    adder = UpdateAdder(updates, cache_bytes=0)
    for a, b in zip([0, *cuts], [*cuts, out.size], strict=True):
        adder.add(out[a:b], a)
    return out.reshape(weight.shape)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 150), st.integers(1, 1100)),
    rank=st.sampled_from([1, 3, 16, 700]),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    data=st.data(),
)
def test_bits_are_the_same_however_a_weight_is_cut(
    shape: tuple[int, int], rank: int, kind: Any, data: Any
) -> None:
    update = make_update(shape, rank, kind=kind)
    size = shape[0] * shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    for wide in (np.float32, np.float64):
        weight = np.random.default_rng(size).standard_normal(shape).astype(wide)
        whole = merged(update, weight, [])
        assert merged(update, weight, cuts).tobytes() == whole.tobytes()
        exact = update.scale * (
            np.asarray(update.up.double()) @ np.asarray(update.down.double())
        ) + weight.astype(np.float64)
        bound = 4 * rank * 2.0**-40 if wide is np.float64 else 2.0**-22
        assert np.abs(whole - exact).max() <= bound * max(1, np.abs(exact).max())


def test_the_sum_is_that_of_rational_numbers_rounded_once() -> None:
    """Elements of 22 bits or fewer below the largest of their row lose nothing."""
    update = make_update((5, 7), 4, kind=torch.bfloat16, scale=0.375)
    weight = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    up, down = update.up.double().tolist(), update.down.double().tolist()
    expected = [
        [
            float(
                Fraction(weight[i, j].item())
                + Fraction(0.375) * sum(Fraction(up[i][r]) * Fraction(down[r][j]) for r in range(4))
            )
            for j in range(7)
        ]
        for i in range(5)
    ]
    whole = merged(update, weight, [])
    assert whole.tolist() == np.array(expected).astype(np.float32).tolist()


def test_small_elements_beside_large_ones_are_added() -> None:
    up, down = torch.tensor([[1.0, 2.0**-30]]), torch.tensor([[0.0], [2.0**10]])
    whole = merged(WeightUpdate(down, up, 1.0), np.zeros((1, 1), np.float32), [])
    assert whole.tolist() == [[2.0**-20]]


def test_factors_of_numpy_are_read_as_those_of_torch() -> None:
    update = make_update((70, 30), 3)
    same = WeightUpdate(np.asarray(update.down), np.asarray(update.up), 2)
    weight = np.zeros((70, 30), np.float32)
    assert merged(update, weight, []).tobytes() == merged(same, weight, [9]).tobytes()
    assert update.digest == same.digest


def test_a_digest_says_all_that_is_added() -> None:
    update = make_update((6, 4), 2)
    others = [
        WeightUpdate(update.down, update.up, 2.5),
        WeightUpdate(update.down, update.up + 1e-7, 2.0),
        WeightUpdate(-update.down, update.up, 2.0),
        WeightUpdate(update.down[:1], update.up[:, :1], 2.0),
    ]
    assert len({update.digest, *(other.digest for other in others)}) == 5


def test_memory_is_bounded_for_wide_weights() -> None:
    update = make_update((8, 50_000), 8)
    for updates, most in (([update], 2 << 20), ([update] * 3, 4 << 20)):
        adder = UpdateAdder(updates, cache_bytes=1 << 20)
        adder.add(np.zeros(400_000, np.float32), 0)
        cached = sum(c.pair.nbytes for term in adder._terms for c in term._cells.values())
        assert cached <= UpdateAdder.num_bytes(updates, 1 << 20) < most


def test_bits_of_several_updates_are_the_same_in_any_order() -> None:
    updates = [make_update((70, 600), rank, scale=1 / rank) for rank in (1, 3, 16, 5)]
    weight = np.random.default_rng(0).standard_normal((70, 600)).astype(np.float64)
    whole = merged(updates, weight, [])
    assert merged(updates[::-1], weight, [17, 20_001]).tobytes() == whole.tobytes()
    exact = weight + sum(
        u.scale * (np.asarray(u.up.double()) @ np.asarray(u.down.double())) for u in updates
    )
    assert np.abs(whole - exact).max() <= 2.0**-34
    assert np.abs(whole - merged(updates[:3], weight, [])).max() > 0.1


ONES = torch.ones


@pytest.mark.parametrize(
    ("down", "up", "scale"),
    [
        (ONES(2, 4), ONES(6, 3), 1.0),
        (ONES(4), ONES(6, 2), 1.0),
        (ONES(0, 4), ONES(6, 0), 1.0),
        (ONES(2, 4, 1), ONES(6, 2), 1.0),
        (ONES(2, 4).int(), ONES(6, 2), 1.0),
        (ONES(2, 4), ONES(6, 2), float("nan")),
        (ONES(2, 4), ONES(6, 2), float("inf")),
    ],
)
def test_factors_that_are_none_are_refused(down: Any, up: Any, scale: float) -> None:
    with raises(FormatError, file="a.safetensors", tensor="q.lora_A"):
        WeightUpdate(down, up, scale, file="a.safetensors", tensor="q.lora_A")


def test_an_update_of_another_shape_is_refused() -> None:
    with raises(MappingError, id="foreign-adapter", tensor="layers.0.attn.q.weight"):
        make_update((6, 4), 2).check_shape("layers.0.attn.q.weight", (4, 6))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_elements_that_are_no_numbers_are_refused(value: float) -> None:
    up = torch.ones(6, 2)
    up[5, 1] = value
    with raises(FormatError, id="nan-weights", file="a.safetensors"):
        WeightUpdate(torch.ones(2, 4), up, 1.0, file="a.safetensors").digest  # noqa: B018
