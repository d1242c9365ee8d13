"""Shares of units: every unit once, contiguous, balanced, and no gap rewritten by two workers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.plan.shares import split_units
from megtool.plan.work_units import Slab, TiledUnit, Unit


def unit(file: int, offset: int, num_bytes: int, *more: int, interleaved: bool = False) -> Unit:
    slab = Slab(entry=0, lo=(0,), hi=(1,))
    return TiledUnit(
        slabs=(slab,),
        files=(file, *more),
        offset=offset,
        num_bytes=num_bytes,
        interleaved=interleaved,
    )


UNITS = st.lists(
    st.builds(
        lambda file, offset, size, more, interleaved: unit(
            file, offset, size, *more, interleaved=interleaved
        ),
        st.integers(0, 5),
        st.integers(0, 100),
        st.integers(0, 64),
        st.lists(st.integers(0, 5), max_size=2),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(UNITS, st.integers(1, 9))
def test_every_unit_is_done_once_and_gaps_are_of_one_worker(units: list[Unit], count: int) -> None:
    shares = split_units(units, count)
    assert shares == split_units(units, count)
    done = [n for worker in range(count) for n in shares.of(worker)]
    assert sorted([*done, *shares.late]) == list(range(len(units)))
    if count == 1:
        assert not shares.late
    writers: dict[int, set[int]] = {}
    for worker in range(count):
        for n in shares.of(worker):
            for file in units[n].files:
                writers.setdefault(file, set()).add(worker)
    for worker in range(count):
        for n in shares.of(worker):
            if isinstance(u := units[n], TiledUnit) and u.interleaved:
                assert all(writers[file] == {worker} for file in u.files)


def test_shares_are_contiguous_and_within_a_unit_of_balanced() -> None:
    units = [unit(n // 10, n % 10 * 64, 64) for n in range(100)]
    for count in (2, 3, 7, 100):
        shares = split_units(units, count)
        assert [n for worker in range(count) for n in shares.of(worker)] == list(range(100))
        sizes = [len(shares.of(worker)) for worker in range(count)]
        assert max(sizes) - min(sizes) <= 1


def test_more_workers_than_units_leave_some_without_work() -> None:
    shares = split_units([unit(0, 0, 10), unit(0, 10, 10)], 5)
    assert sorted(len(shares.of(worker)) for worker in range(5)) == [0, 0, 0, 1, 1]


def test_a_file_with_gaps_goes_to_one_worker_where_that_is_balanced() -> None:
    units = [unit(f, k * 10, 10, interleaved=k == 3) for f in range(8) for k in range(4)]
    shares = split_units(units, 4)
    assert not shares.late
    assert [len(shares.of(worker)) for worker in range(4)] == [8, 8, 8, 8]


def test_gaps_in_a_file_of_several_workers_are_left_to_the_publisher() -> None:
    units = [unit(0, k * 10, 10, interleaved=k == 3) for k in range(8)]
    assert split_units(units, 4).late == {3}
