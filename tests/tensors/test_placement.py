"""Placements against numpy: fusing, stacking, padding, transposing and permuting by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import MappingError
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement, lattice, lattice_boxes, narrow, pieces, refine
from tests.support.checkpoints.placements import place
from tests.support.errors import raises


def indices(p: Placement) -> tuple[np.ndarray, ...]:
    """The stored index of every canonical element, in row-major order."""
    count = math.prod(p.shape)
    view = np.indices(p.shape).reshape(len(p.shape), count)
    out = [np.full(count, b) for b in p.base]
    for j, (d, m) in enumerate(zip(p.dims, p.mults, strict=True)):
        out[d] = out[d] + view[j] * m
    return tuple(out)


def gather(p: Placement, stored: np.ndarray) -> np.ndarray:
    return np.asarray(stored[indices(p)]).reshape(-1)


@st.composite
def placements(draw):
    """Any placement in a stored tensor: each stored dimension is a mixed-radix number with gaps."""
    ndim = draw(st.integers(0, 3))
    axes, base, shape = [], [], []
    for d in range(ndim):
        lo, reach, mult = draw(st.integers(0, 2)), 0, 1
        for _ in range(draw(st.integers(0, 3))):
            n, gap = draw(st.integers(1, 3)), draw(st.integers(0, 2))
            mult = reach + 1 + (gap if n > 1 else 0)
            axes.append((n, d, mult))
            reach += (n - 1) * mult
        base.append(lo)
        shape.append(lo + reach + 1 + draw(st.integers(0, 2)))
    axes = draw(st.permutations(axes))
    p = place([a[0] for a in axes], [a[1] for a in axes], [a[2] for a in axes], base)
    return p, tuple(shape)


@st.composite
def grids(draw, shape):
    """Shards that tile a stored tensor, cut anywhere, some of them empty."""
    cuts = [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=2))), n] for n in shape]
    pairs = [list(itertools.pairwise(c)) for c in cuts]
    cells = [([a for a, _ in cell], [b for _, b in cell]) for cell in itertools.product(*pairs)]
    return Boxes.of(cells, len(shape))


@given(placements(), st.data())
def test_pieces_and_lattice_find_every_element_once(case, data):
    """What shards hold, read at the lattice's positions, is the canonical tensor."""
    p, shape = case
    stored = np.arange(math.prod(shape)).reshape(shape)
    shards = data.draw(grids(shape))
    rows, boxes = pieces(p, shards)
    assert boxes.filled.all()
    assert (np.diff(rows) >= 0).all()
    start, stride = lattice(p, shards.lo[rows], shards.hi[rows], boxes.lo)
    canonical, count = np.full(p.shape, -1), np.zeros(p.shape, int)
    for k, row in enumerate(rows.tolist()):
        where = tuple(map(slice, shards.lo[row].tolist(), shards.hi[row].tolist()))
        flat = stored[where].reshape(-1)
        view = tuple(map(slice, boxes.lo[k].tolist(), boxes.hi[k].tolist()))
        inner = np.indices(boxes.shape[k].tolist())
        position = start[k] + sum(
            (i * s for i, s in zip(inner, stride[k].tolist(), strict=True)),
            np.zeros(boxes.shape[k].tolist(), int),
        )
        canonical[view] = flat[position]
        count[view] += 1
    assert (count == 1).all()
    assert canonical.reshape(-1).tolist() == gather(p, stored).tolist()


@given(st.data())
def test_lattice_boxes_are_the_indices_in_range(data):
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=3))
    mults, reach = [], 0
    for n in reversed(sizes):
        mults.insert(0, reach + 1 + data.draw(st.integers(0, 3)))
        reach += (n - 1) * mults[0]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(-3, reach + 3)] * 2)))
    count = np.zeros(sizes, int)
    boxes = lattice_boxes(sizes, mults, start, stop)
    for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True):
        count[tuple(map(slice, lo, hi))] += 1
    value = sum(
        (i * m for i, m in zip(np.indices(sizes), mults, strict=True)), np.zeros(sizes, int)
    )
    assert (count == ((start <= value) & (value < stop))).all()
    assert len(boxes) <= max(2 * len(sizes), 1)


def blocks(draw, n):
    """A way to cut a size of two and three into factors."""
    out = []
    while n > 1:
        f = draw(st.sampled_from([f for f in range(2, n + 1) if n % f == 0]))
        out.append(f)
        n //= f
    return out


@given(st.data())
def test_refined_placements_mean_the_same_over_one_shape(data):
    """Powers of two cut in any way nest."""
    total = 1 << data.draw(st.integers(0, 6))
    sides = []
    for stored in ("a", "b"):
        shape = blocks(data.draw, total)
        if data.draw(st.booleans()):
            shape.insert(data.draw(st.integers(0, len(shape))), 1)
        dims = data.draw(st.permutations(range(len(shape))))
        sides.append(place(shape, dims, [1] * len(shape), [0] * len(shape), stored))
    a, b = refine(*sides)
    assert a.shape == b.shape
    for before, after in zip(sides, (a, b), strict=True):
        assert (before.stored, before.base) == (after.stored, after.base)
        assert [i.tolist() for i in indices(before)] == [i.tolist() for i in indices(after)]


def test_cuts_that_do_not_nest_are_refused():
    a = place((2, 3), (0, 1), (1, 1), (0, 0), "a")
    b = place((3, 2), (0, 1), (1, 1), (0, 0), "b")
    with pytest.raises(MappingError, match="do not nest"):
        refine(a, b)


def test_other_sizes_are_refused():
    with raises(MappingError, "6 elements", "'a'", "8", "'b'"):
        refine(
            place((2, 3), (0, 1), (1, 1), (0, 0), "a"), place((2, 4), (0, 1), (1, 1), (0, 0), "b")
        )


def test_tensors_without_elements_have_no_pieces_and_no_refinement():
    p = place((0, 3), (0, 1), (1, 1), (2, 0))
    rows, boxes = pieces(p, Boxes.whole((4, 3)))
    assert (len(rows), len(boxes)) == (0, 0)
    with pytest.raises(MappingError, match="zero-size"):
        refine(p, place((3, 0), (0, 1), (1, 1), (0, 0)))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_qkv_in_query_groups_is_three_placements(groups):
    """Per group: the group's query heads, its key, its value; as numpy builds it."""
    heads, width, hidden = 8, 2, 3
    rng = np.random.default_rng(groups)
    q = rng.integers(0, 100, (heads * width, hidden))
    k, v = rng.integers(0, 100, (2, groups * width, hidden))
    fused = np.concatenate([x.reshape(groups, -1, hidden) for x in (q, k, v)], axis=1).reshape(
        -1, hidden
    )
    per = heads // groups * width
    block = per + 2 * width
    for n, first, want in ((per, 0, q), (width, per, k), (width, per + width, v)):
        p = place((groups, n, hidden), (0, 0, 1), (block, 1, 1), (first, 0))
        assert (gather(p, fused).reshape(want.shape) == want).all()


def test_the_usual_fusions_are_placements():
    rng = np.random.default_rng(0)
    gate, up = rng.integers(0, 100, (2, 4, 3))
    pairs = {
        "gate above up": (np.concatenate([gate, up]), (4, 3), (0, 1), (1, 1), (4, 0)),
        "interleaved rows": (np.stack([gate, up], 1).reshape(8, 3), (4, 3), (0, 1), (2, 1), (1, 0)),
        "stacked": (np.stack([gate, up]), (4, 3), (1, 2), (1, 1), (1, 0, 0)),
        "stacked, transposed": (np.stack([gate.T, up.T]), (4, 3), (2, 1), (1, 1), (1, 0, 0)),
        "padded": (np.pad(up, ((0, 3), (0, 0))), (4, 3), (0, 1), (1, 1), (0, 0)),
        "rotary rows": (
            up.reshape(2, 2, 3).transpose(1, 0, 2).reshape(4, 3),
            (2, 2, 3),
            (0, 0, 1),
            (1, 2, 1),
            (0, 0),
        ),
    }
    for name, (stored, *parts) in pairs.items():
        assert (gather(place(*parts), stored).reshape(up.shape) == up).all(), name


def test_identity_is_told_by_indices_alone():
    p = Placement.identity("x", (2, 3), stored="y")
    assert p.is_identity
    assert (p.canonical, p.stored) == ("x", "y")
    assert Placement.identity("x", ()).is_identity
    for change in ({"base": (0, 1)}, {"dims": (1, 0)}, {"mults": (2, 1)}):
        assert not dataclasses.replace(p, **change).is_identity


def test_positions_are_exact_in_huge_tensors():
    """Strides of a stored tensor with 2**62 elements."""
    n = 1 << 31
    p = place((n, n), (1, 0), (1, 1), (0, 0))
    shards = Boxes.of([((0, n - 4), (n, n))], 2)
    rows, boxes = pieces(p, shards)
    assert (rows.tolist(), boxes.lo.tolist(), boxes.hi.tolist()) == ([0], [[n - 4, 0]], [[n, n]])
    start, stride = lattice(p, shards.lo, shards.hi, np.array([[n - 1, n - 1]]))
    assert (start.tolist(), stride.tolist()) == ([4 * n - 1], [[1, 4]])


@given(placements(), st.data())
def test_a_narrowed_placement_is_a_box_of_the_view(placed, data) -> None:
    p, shape = placed
    stored = np.arange(math.prod(shape)).reshape(shape)
    lo = [data.draw(st.integers(0, n)) for n in p.shape]
    hi = [data.draw(st.integers(a, n)) for a, n in zip(lo, p.shape, strict=True)]
    box = gather(p, stored).reshape(p.shape)[tuple(map(slice, lo, hi))]
    assert narrow(p, lo, hi).shape == box.shape
    np.testing.assert_array_equal(gather(narrow(p, lo, hi), stored), box.reshape(-1))
