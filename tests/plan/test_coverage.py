"""Claims of placements, counted element by element and compared with the proof."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import CoverageError, MappingError
from megtool.plan import coverage
from megtool.plan.coverage import check_placements
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.placements import place
from tests.support.errors import raises


def tensor(*shape: int, name: str = "s") -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype("float32"))


def claims(shape, placements) -> np.ndarray | None:
    """How often every element is claimed; None where one is claimed outside the tensor."""
    count = np.zeros(shape, int)
    for p in placements:
        size = math.prod(p.shape)
        view = np.indices(p.shape).reshape(len(p.shape), size)
        where = [np.full(size, b) for b in p.base]
        for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):
            where[d] = where[d] + view[j] * m
        if any((w < 0).any() or (w >= n).any() for w, n in zip(where, shape, strict=True)):
            return None
        np.add.at(count, tuple(where), 1)
    return count


def fault(shape, placements, whole) -> str:
    try:
        check_placements([tensor(*shape)], placements, complete=whole)
    except CoverageError as e:
        return e.message
    return ""


@st.composite
def any_placement(draw, shape):
    axes, base = [], []
    for d, n in enumerate(shape):
        at = draw(st.integers(0, n - 1))
        base.append(at)
        left = n - 1 - at
        for _ in range(draw(st.integers(0, 2))):
            mult = draw(st.integers(1, max(left, 1)))
            count = draw(st.integers(1, left // mult + 1))
            left -= (count - 1) * mult
            axes.append((count, d, mult))
    axes = draw(st.permutations(axes))
    return place([a[0] for a in axes], [a[1] for a in axes], [a[2] for a in axes], base)


@given(st.data(), st.booleans())
def test_the_proof_agrees_with_counting(data, whole):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    placements = data.draw(st.lists(any_placement(shape), max_size=4))
    count = claims(shape, placements)
    message = fault(shape, placements, whole)
    wrong = count != 1 if whole else count > 1
    assert bool(message) == bool(wrong.any())
    if "element" in message:
        at = tuple(json.loads(message[message.index("[") : message.index("]") + 1]))
        assert wrong[at]
        assert f"claimed {count[at]} times" in message


@given(st.data())
def test_claims_of_random_boxes_and_stripes_can_be_whole(data):
    """Stripes `base + k * step` for every base, cut into blocks of columns: a true cover."""
    step, n, cols = (data.draw(st.integers(1, 4)) for _ in range(3))
    cut = data.draw(st.integers(0, cols))
    placements = [
        place((n, hi - lo), (0, 1), (step, 1), (b, lo))
        for b in range(step)
        for lo, hi in ((0, cut), (cut, cols))
        if lo < hi
    ]
    shape = (step * n, cols)
    assert fault(shape, placements, True) == ""
    dropped = data.draw(st.integers(0, len(placements) - 1))
    rest = placements[:dropped] + placements[dropped + 1 :]
    assert "claimed 0 times" in fault(shape, rest, True)
    assert fault(shape, rest, False) == ""
    assert "claimed 2 times" in fault(shape, [*rest, rest[0]], False) if rest else True


def test_placements_without_elements_claim_nothing():
    nothing = place((0, 3), (0, 1), (1, 1), (1, 0))
    all_of_it = Placement.identity("c", (4, 3), stored="s")
    assert fault((4, 3), [nothing, all_of_it], True) == ""
    assert "claimed 0 times" in fault((4, 3), [nothing], True)
    assert fault((0, 3), [place((0, 3), (0, 1), (1, 1), (0, 0))], True) == ""


@pytest.mark.parametrize(
    ("p", "says"),
    [
        (place((4,), (0,), (1,), (1,)), "reaches indices 1 to 4 of a dimension of 4"),
        (place((2,), (0,), (1,), (-1,)), "reaches indices -1 to 0"),
        (place((2, 2), (0, 0), (1, 1), (0,)), "claims an index twice"),
    ],
)
def test_impossible_claims_are_named(p, says):
    with raises(CoverageError, match=says, tensor="s"):
        check_placements([tensor(4)], [p], complete=False)


def test_a_placement_of_other_dimensions_is_refused():
    with pytest.raises(MappingError, match="shape \\[4, 1\\]"):
        check_placements([tensor(4, 1)], [Placement.identity("c", (4,), stored="s")], complete=True)


def test_an_identity_smaller_than_its_tensor_leaves_a_hole():
    p = Placement.identity("c", (3, 2), stored="s")
    assert "element [3, 0] is claimed 0 times" in fault((5, 2), [p], True)
    assert fault((5, 2), [p], False) == ""


def test_huge_dimensions_cost_nothing():
    """A flat buffer of 2**40 elements: stripes are counted by their ends, not one by one."""
    n = 1 << 40
    parts = [place((n // 4,), (0,), (1,), (k * n // 4,)) for k in range(4)]
    assert fault((n,), parts, True) == ""
    interleaved = [place((2, n // 4), (0, 0), (n // 2, 1), (k * n // 4,)) for k in range(2)]
    assert fault((n,), interleaved, True) == ""
    assert "claimed 2 times" in fault((n,), [*interleaved, parts[3]], False)


def test_layers_placed_alike_are_proved_once(monkeypatch):
    names = [f"layer{k}" for k in range(50)]
    checked = []
    monkeypatch.setattr(coverage, "_check", lambda tensor, *_: checked.append(tensor.name))
    check_placements(
        [tensor(4, 3, name=n) for n in names],
        [place((2, 3), (0, 1), (1, 1), (b, 0), n) for n in names for b in (0, 2)],
        complete=True,
    )
    assert checked == ["layer0"]
