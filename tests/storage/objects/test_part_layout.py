"""Parts of an object: none is too small, and they end where others begin to write."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.part_layout import CopyRun, cut_parts
from megtool.storage.stores.protocol import MAX_PARTS

SOURCE = StorePath("memory://bucket/source")


@st.composite
def objects(draw: st.DrawFn) -> tuple[int, list[CopyRun], list[int]]:
    """A size, runs that the server can copy, and borders."""
    size = draw(st.integers(1, 5000))
    marks = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    runs = [CopyRun(a, b - a, SOURCE, 7 * a) for a, b in list(pairwise(marks))[::2]]
    return size, runs, sorted(draw(st.sets(st.integers(0, size), max_size=6)))


@pytest.mark.parametrize(("part", "least"), [(800, 500), (500, 500), (100, 1)])
def test_no_part_is_too_small(monkeypatch: pytest.MonkeyPatch, part: int, least: int) -> None:
    monkeypatch.setattr(part_layout, "PART_BYTES", part)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", least)

    @given(objects())
    def check(drawn: tuple[int, list[CopyRun], list[int]]) -> None:
        size, runs, borders = drawn
        layout = cut_parts(size, runs, borders)
        assert len(layout) <= MAX_PARTS
        ends = list(layout.ends)
        assert ends == sorted(ends)
        assert ends[-1] == size
        assert all(b - a >= least for a, b in list(pairwise([0, *ends]))[:-1])
        for number, run in layout.copies.items():
            begin, end = layout.bounds(number)
            assert (run.offset, run.end) == (begin, end)
            assert run.source_offset - run.offset in {r.source_offset - r.offset for r in runs}

    check()


def test_a_part_ends_at_each_border_that_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_layout, "PART_BYTES", 800)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", 500)
    assert list(cut_parts(4000).ends) == [800, 1600, 2400, 3200, 4000]
    assert list(cut_parts(4000, borders=[1700, 3900]).ends) == [850, 1700, 2800, 3900, 4000]
    assert list(cut_parts(4000, borders=[100, 1700, 1800]).ends) == [850, 1700, 2850, 4000]
    run = CopyRun(2000, 1000, SOURCE, 0)
    assert list(cut_parts(4000, [run], [600, 2300]).ends) == [600, 2000, 3000, 4000]
