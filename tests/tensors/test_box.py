"""Boxes against numpy: every operation is compared with painted arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.tensors import box
from megtool.tensors.box import Boxes

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape, max_boxes=6):
    """Boxes inside a tensor, some of them empty."""
    pairs = []
    for _ in range(draw(st.integers(0, max_boxes))):
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        pairs.append(([e[0] for e in ends], [e[1] for e in ends]))
    return Boxes.of(pairs, len(shape))


@st.composite
def tensors_with_boxes(draw, **limits):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape, **limits))


@st.composite
def tilings(draw, shape):
    """Boxes that tile a tensor: cut again and again at random places."""
    rest = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 6))):
        if not shape:
            break
        lo, hi = rest.pop(draw(st.integers(0, len(rest) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(lo[d], hi[d]))
        rest += [
            (lo, [*hi[:d], at, *hi[d + 1 :]]),
            ([*lo[:d], at, *lo[d + 1 :]], hi),
        ]
    return Boxes.of(draw(st.permutations(rest)), len(shape))


def slices(boxes: Boxes, row: int) -> tuple[slice, ...]:
    return tuple(map(slice, boxes.lo[row].tolist(), boxes.hi[row].tolist()))


def paint(shape, boxes: Boxes) -> np.ndarray:
    count = np.zeros(shape, int)
    for row in range(len(boxes)):
        count[slices(boxes, row)] += 1
    return count


def one(shape) -> np.ndarray:
    return np.array([shape], np.int64).reshape(1, len(shape))


def first_fault(count: np.ndarray):
    """The first element, in row-major order, that is not counted once."""
    wrong = np.argwhere(count != 1)
    return None if not len(wrong) else (tuple(wrong[0].tolist()), int(count[tuple(wrong[0])]))


@given(tensors_with_boxes())
def test_volume_and_filled_count_elements(case):
    shape, boxes = case
    index = np.zeros(shape)
    sizes = [index[slices(boxes, r)].size for r in range(len(boxes))]
    assert boxes.volume().tolist() == sizes
    assert boxes.filled.tolist() == [n > 0 for n in sizes]


def test_a_box_is_filled_although_its_volume_overflows():
    boxes = Boxes.of([((0, 0), (1 << 32, 1 << 32))], 2)
    assert boxes.filled.tolist() == [True]


@given(st.data())
def test_intersections_are_those_of_the_elements(data):
    shape = data.draw(shapes)
    n = data.draw(st.integers(0, 4))
    a, b = (data.draw(boxes_in(shape).filter(lambda x: len(x) >= n))[:n] for _ in range(2))
    both = box.intersect(a, b)
    for row in range(n):
        want = np.zeros(shape, int)
        want[slices(a, row)] += 1
        want[slices(b, row)] += 1
        assert (paint(shape, both[row : row + 1]) == (want == 2)).all()


@given(st.data())
def test_join_finds_every_pair_that_shares_an_element(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape, 12)), data.draw(boxes_in(shape, 12))
    grouped = data.draw(st.booleans())
    groups = st.integers(0, 3)
    of_a = np.array(data.draw(st.lists(groups, min_size=len(a), max_size=len(a))), np.int64)
    of_b = np.array(data.draw(st.lists(groups, min_size=len(b), max_size=len(b))), np.int64)
    i, j = box.join(a, b, of_a, of_b) if grouped else box.join(a, b)
    want = [
        (k, m)
        for k, m in itertools.product(range(len(a)), range(len(b)))
        if box.intersect(a[k : k + 1], b[m : m + 1]).filled[0]
        and (not grouped or of_a[k] == of_b[m])
    ]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == want


@pytest.mark.parametrize("far", [0, 1 << 40, 1 << 61])
def test_join_is_exact_far_out(far):
    """Positions times groups pass 2**63 here."""
    a = Boxes.of([((far + k, 0), (far + k + 2, 1)) for k in range(5)], 2)
    of = np.arange(5, dtype=np.int64) * 1000
    i, j = box.join(a, a, of, of)
    assert i.tolist() == j.tolist() == [0, 1, 2, 3, 4]
    i, j = box.join(a, a)
    assert len(i) == 5 + 2 * 4


def test_join_in_slices_finds_what_one_pass_finds(monkeypatch):
    rng = np.random.default_rng(0)
    lo = rng.integers(0, 50, (300, 2))
    a, b = Boxes(lo[:200], lo[:200] + 3), Boxes(lo[100:], lo[100:] + 5)
    whole = box.join(a, b)
    monkeypatch.setattr(box, "_PAIRS_AT_A_TIME", 7)
    sliced = box.join(a, b)
    assert all((x == y).all() for x, y in zip(whole, sliced, strict=True))
    assert len(whole[0])


@given(st.data())
def test_tilings_are_covered(data):
    shape = data.draw(shapes)
    tiling = data.draw(tilings(shape))
    assert box.cover_fault(tiling, one(shape)) is None


@given(tensors_with_boxes())
def test_the_first_fault_is_named_with_its_count(case):
    shape, boxes = case
    fault = box.cover_fault(boxes, one(shape))
    want = first_fault(paint(shape, boxes))
    assert (None if fault is None else (fault.index, fault.times)) == want
    if fault:
        assert fault.kind == ("hole" if fault.times == 0 else "overlap")


@given(st.data())
def test_one_box_too_many_or_too_few_is_found(data):
    shape = data.draw(shapes)
    tiling = data.draw(tilings(shape))
    row = data.draw(st.integers(0, len(tiling) - 1))
    keep = np.arange(len(tiling)) != row
    missing = tiling[np.flatnonzero(keep)]
    doubled = box.concatenate([tiling, tiling[row : row + 1]], len(shape))
    for boxes in (missing, doubled):
        fault = box.cover_fault(boxes, one(shape))
        want = first_fault(paint(shape, boxes))
        assert (None if fault is None else (fault.index, fault.times)) == want


@given(st.data())
def test_many_tensors_are_checked_together(data):
    """Tensors of other numbers of dimensions are padded; the fault is in the first bad tensor."""
    some = data.draw(st.lists(shapes, min_size=1, max_size=5))
    width = max(map(len, some))
    parts, group, faults = [], [], []
    for number, shape in enumerate(some):
        boxes = data.draw(st.one_of(tilings(shape), boxes_in(shape)))
        pad = width - len(shape)
        parts.append(
            Boxes(
                np.pad(boxes.lo, ((0, 0), (0, pad))),
                np.pad(boxes.hi, ((0, 0), (0, pad)), constant_values=1),
            )
        )
        group += [number] * len(boxes)
        if fault := first_fault(paint(shape, boxes)):
            faults.append((number, fault[0] + (0,) * pad, fault[1]))
    padded = np.array([[*s, *[1] * (width - len(s))] for s in some], np.int64)
    fault = box.cover_fault(
        box.concatenate(parts, width), padded.reshape(len(some), width), np.array(group, np.int64)
    )
    found = None if fault is None else (fault.group, fault.index, fault.times)
    assert found == (faults[0] if faults else None)


@pytest.mark.parametrize("size", [3, 1 << 20, 1 << 31, 1 << 40])
def test_cover_is_exact_whatever_the_size(size):
    """Corners of the larger ones do not fit one 64-bit key, and volumes do not either."""
    shape = (size, size, 4)
    halves = [((0, 0, 0), (size, size - 1, 4)), ((0, size - 1, 0), (size, size, 4))]
    assert box.cover_fault(Boxes.of(halves, 3), one(shape)) is None
    hole = Boxes.of([halves[0], ((0, size - 1, 0), (size - 1, size, 4))], 3)
    fault = box.cover_fault(hole, one(shape))
    assert fault == box.CoverFault(0, (size - 1, size - 1, 0), 0)
    overlap = Boxes.of([*halves, ((size - 2, 1, 2), (size - 1, 2, 3))], 3)
    assert box.cover_fault(overlap, one(shape)) == box.CoverFault(0, (size - 2, 1, 2), 2)


@given(st.data())
def test_long_keys_order_as_short_ones_do(data):
    shape = data.draw(shapes)
    boxes = data.draw(boxes_in(shape))
    scale = 1 << 59
    far = Boxes(boxes.lo * scale, boxes.hi * scale)
    near, apart = (
        box.cover_fault(b, one(s)) for b, s in ((boxes, shape), (far, [n * scale for n in shape]))
    )
    assert (near is None) == (apart is None)
    if near and apart:
        assert apart.index == tuple(i * scale for i in near.index)
        assert apart.times == near.times


def test_cover_goes_tensor_by_tensor_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(box, "_CORNERS_AT_A_TIME", 16)
    n = 50
    halves = [((k % 2,), (k % 2 + 1,)) for k in range(2 * n)]
    group = np.repeat(np.arange(n, dtype=np.int64), 2)
    good = Boxes.of(halves, 1)
    assert box.cover_fault(good, np.full((n, 1), 2), group) is None
    fault = box.cover_fault(good, np.where(np.arange(n)[:, None] == 37, 3, 2), group)
    assert fault == box.CoverFault(37, (2,), 0)


@given(st.data())
def test_outside_lists_boxes_that_leave_their_tensor(data):
    shape = data.draw(shapes)
    anywhere = st.integers(-2, 7)
    pairs = data.draw(
        st.lists(
            st.tuples(st.tuples(*[anywhere] * len(shape)), st.tuples(*[anywhere] * len(shape))),
            max_size=4,
        )
    )
    boxes = Boxes.of(pairs, len(shape))
    bad = [
        row
        for row, (lo, hi) in enumerate(pairs)
        if any(not 0 <= a <= b <= n for a, b, n in zip(lo, hi, shape, strict=True))
    ]
    shaped = np.tile(np.array(shape, np.int64), (len(pairs), 1)).reshape(len(pairs), len(shape))
    assert box.outside(boxes, shaped).tolist() == bad


@given(tensors_with_boxes())
def test_the_difference_is_what_no_hole_covers(case):
    shape, holes = case
    left = box.difference([0] * len(shape), shape, holes)
    assert (paint(shape, left) == (paint(shape, holes) == 0)).all()
    assert left.filled.all()


@given(shapes, st.data())
def test_a_flat_range_is_a_handful_of_boxes_in_order(shape, data):
    total = box.numel(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    boxes = box.from_flat(shape, start, stop)
    index = np.arange(total).reshape(shape)
    got = [index[slices(boxes, row)].reshape(-1) for row in range(len(boxes))]
    assert np.concatenate([*got, np.zeros(0, int)]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_flat_range_outside_is_refused(start, stop):
    with pytest.raises(ValueError, match="6 elements"):
        box.from_flat((2, 3), start, stop)


@given(tensors_with_boxes())
def test_the_runs_of_a_box_are_its_elements_and_as_long_as_they_can_be(case):
    shape, boxes = case
    index = np.arange(box.numel(shape)).reshape(shape)
    for row in range(len(boxes)):
        starts, length = box.to_flat(shape, boxes.lo[row].tolist(), boxes.hi[row].tolist())
        elements = index[slices(boxes, row)].reshape(-1)
        assert (starts[:, None] + np.arange(length)).reshape(-1).tolist() == elements.tolist()
        if len(starts) > 1 and length < shape[-1]:
            assert (np.diff(starts) > length).all()


@given(st.integers(0, 1 << 62), st.integers(1, 40))
def test_splits_are_near_even_and_complete(size, parts):
    cuts = box.split(size, parts)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    lengths = [b - a for a, b in cuts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(shapes)
def test_strides_are_those_of_numpy(shape):
    full = tuple(max(n, 1) for n in shape)
    want = tuple(s // 8 for s in np.zeros(full, np.int64).strides)
    assert box.strides(full) == want
    assert box.row_major_strides(one(full)).tolist() == [list(want)]
