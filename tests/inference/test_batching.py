"""Batching: nobody waits while there is room, nobody is overtaken, order comes back; stops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.inference.batching import BatchScheduler, GenerateRequest, InOrder, left_padded
from megtool.inference.stop_strings import Stops
from tests.support.errors import raises

REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20)


@given(REQUESTS, st.integers(1, 5), st.integers(1, 8), st.data())
def test_every_request_runs_once_within_slots_and_pages(
    sizes: list[tuple[int, int]], num_slots: int, page_size: int, data: st.DataObject
) -> None:
    requests = [
        GenerateRequest(number=n, prompt=(0,) * length, max_new_tokens=new)
        for n, (length, new) in enumerate(sizes)
    ]
    needs = [-(-r.num_positions // page_size) for r in requests]
    num_pages = data.draw(st.integers(max(needs), sum(needs)))
    schedule = BatchScheduler(
        requests, num_slots=num_slots, num_pages=num_pages, page_size=page_size
    )
    entered: list[int] = []
    while schedule.is_busy:
        entered += [one.request.number for one in schedule.enter(most_tokens=40)]
        running = list(schedule.running.values())
        assert running, "work is left, and nobody does it"
        assert len(running) <= num_slots
        assert len({one.slot for one in running}) == len(running)
        assert sum(needs[one.request.number] for one in running) <= num_pages
        for one in data.draw(st.lists(st.sampled_from(running), unique_by=id, min_size=1)):
            schedule.leave(one)
    assert entered == list(range(len(requests)))


def test_a_request_that_never_fits_is_refused() -> None:
    request = GenerateRequest(number=4, prompt=(1,) * 50, max_new_tokens=20)
    with raises(UsageError, "4", "5 pages", "16"):
        BatchScheduler([request], num_slots=2, num_pages=4, page_size=16)


@given(st.permutations(range(8)))
def test_results_come_back_in_order(order: list[int]) -> None:
    ready: InOrder[str] = InOrder()
    out = [r for number in order for r in ready.add(number, str(number))]
    assert out == [str(n) for n in range(8)]


def test_rows_are_padded_on_the_left() -> None:
    assert left_padded([[1, 2, 3], [4]], 0) == (
        [[1, 2, 3], [0, 0, 4]],
        [[True, True, True], [False, False, True]],
    )


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4)), st.data())
def test_text_ends_before_a_stop_string_however_it_is_cut(
    text: str, strings: list[str], data: st.DataObject
) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    expected = text[: min(ends)[1]] if ends else text
    stops, shown, left = Stops(strings), "", text
    while left:
        size = data.draw(st.integers(1, len(left)))
        shown += stops.add(left[:size])
        assert expected.startswith(shown), "what was shown cannot be taken back"
        left = left[size:]
    assert stops.stopped is bool(ends)
    assert shown + stops.finish() == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        Stops(["a", ""])
