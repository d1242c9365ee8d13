"""Runs of steps, compared with what the elements' positions say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.plan import planner
from megtool.plan.copies import KERNEL_RUN_BYTES, Fill, PlanSource, common_runs
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


def runs_by_hand(shape, a, b) -> tuple[int, bool]:
    """The longest run of inner dimensions that is contiguous on both sides, and if it is all."""
    inner = np.indices(shape).reshape(len(shape), int(np.prod(shape)))
    places = [
        sum((i * s for i, s in zip(inner, x, strict=True)), np.zeros(inner.shape[1], int))
        for x in (a, b)
    ]
    best = 1
    for d in range(len(shape) + 1):
        n = int(np.prod(shape[d:]))
        if all((x[:n] == x[0] + np.arange(n)).all() for x in places):
            best = max(best, n)
    return best, best == inner.shape[1]


@given(st.data())
def test_common_runs_are_the_longest_on_both_sides(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    sides = []
    for _ in range(2):
        full = [n + data.draw(st.sampled_from([0, 0, 1])) for n in shape]
        order = data.draw(st.one_of(st.just(range(len(shape))), st.permutations(range(len(shape)))))
        stride, step = [0] * len(shape), 1
        for d in reversed(order):
            stride[d], step = step, step * full[d]
        sides.append(stride)
    table = [np.array([x], np.int64).reshape(1, len(shape)) for x in (shape, *sides)]
    run, whole = common_runs(*table)
    assert (int(run[0]), bool(whole[0])) == runs_by_hand(shape, *sides)


def job(raw, shape, source_cut, target_cut, kinds=("float32", "float32"), transposed=False):
    """One tensor, each side cut along one dimension into equal parts, as `(dim, parts)`."""
    sides = []
    for (dim, parts), kind in zip((source_cut, target_cut), kinds, strict=True):
        stored = tuple(reversed(shape)) if transposed and not sides else tuple(shape)
        n = stored[dim] // parts
        grid = []
        for k in range(parts):
            lo, hi = [0] * len(stored), list(stored)
            lo[dim], hi[dim] = k * n, (k + 1) * n
            grid.append((lo, hi, 0))
        tensor = GlobalTensor(name="t", shape=stored, dtype=dtype(kind))
        sides.append(raw.lay_out(Path(f"side{len(sides)}"), [tensor], [grid]))
    same = Placement.identity("t", shape)
    at = same
    if transposed:
        at = Placement(
            canonical="t", stored="t", shape=tuple(shape), dims=(1, 0), mults=(1, 1), base=(0, 0)
        )
    source = PlanSource(catalogue=sides[0], placements={"t": at})
    return planner.build_plan([source], raw.destination(sides[1]), {"t": same})


ROW = KERNEL_RUN_BYTES // 4  # elements of float32 in a run that is just long enough


@pytest.mark.parametrize(
    ("shape", "source", "target", "steps", "run", "plain"),
    [
        ((8, 16), (0, 4), (0, 2), 4, 2 * 16, True),  # rows: all of each step in one run
        ((8, 16), (0, 1), (1, 4), 4, 4, False),  # columns: short runs, many
        ((8, 2 * ROW), (0, 1), (1, 2), 2, ROW, True),  # columns, but long ones
        ((8, 2 * ROW - 2), (0, 1), (1, 2), 2, ROW - 1, False),
        ((1, 16), (0, 1), (1, 4), 4, 4, True),  # one row is one run however short
    ],
)
def test_steps_are_plain_when_their_runs_are_long(raw, shape, source, target, steps, run, plain):
    plan = job(raw, shape, source, target)
    got, is_plain = plan.step_runs()
    assert got.tolist() == [run * 4] * steps
    assert is_plain.tolist() == [plain] * steps


def test_a_transpose_is_never_plain_but_a_vector_is(raw):
    run, plain = job(raw, (8, 8), (0, 2), (0, 2), transposed=True).step_runs()
    assert (run.tolist(), plain.tolist()) == ([4] * 4, [False] * 4)
    run, plain = job(raw, (8, 1), (0, 1), (0, 2), transposed=True).step_runs()
    assert (run.tolist(), plain.tolist()) == ([16] * 2, [True] * 2)


def test_casts_are_never_plain(raw):
    plan = job(raw, (8, ROW), (0, 1), (0, 1), kinds=("float32", "bfloat16"))
    run, plain = plan.step_runs()
    assert (run.tolist(), plain.tolist()) == ([8 * ROW * 2], [False])


def test_fills_count_their_bytes(raw):
    kind = dtype("float32")
    source = raw.lay_out(
        Path("a"), [GlobalTensor(name="t", shape=(4, 2), dtype=kind)], [[([0, 0], [4, 2], 0)]]
    )
    target = raw.lay_out(
        Path("b"),
        [GlobalTensor(name="t", shape=(6, 2), dtype=kind)],
        [[([0, 0], [5, 2], 0), ([5, 0], [6, 2], 0)]],
    )
    same = {"t": Placement.identity("t", (4, 2))}
    plan = planner.build_plan(
        [PlanSource(catalogue=source, placements=same)],
        raw.destination(target),
        same,
        fills=[Fill(stored="t", lo=(4, 0), hi=(6, 2))],
    )
    run, plain = plan.step_runs()
    assert run.tolist() == [32, 8, 8]
    assert plain.tolist() == [True, False, False]
