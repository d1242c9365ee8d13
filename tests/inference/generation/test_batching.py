"""Batching: every request ends, the important ones first; order comes back; stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.inference.generation.batching import (
    BatchScheduler,
    GenerateRequest,
    InOrder,
    Reservation,
    Running,
    left_padded,
)
from megtool.inference.generation.stop_strings import Stops
from tests.support.errors import raises

REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20)


class PagedRoom:
    """Pages that sequences take as they grow."""

    is_chunked = True

    def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
        self.num_slots, self.num_pages, self.page_size = num_slots, num_pages, page_size
        self.prefill_tokens = 8
        self.pages: dict[int, int] = {}

    def check(self, request: GenerateRequest) -> None:
        """Every request of these tests fits."""

    def _take(self, running: Running, tokens: int) -> bool:
        need = -(-tokens // self.page_size) - self.pages.get(running.number, 0)
        if sum(self.pages.values()) + need > self.num_pages:
            return False
        self.pages[running.number] = self.pages.get(running.number, 0) + need
        return True

    def enter(self, running: Running) -> bool:
        assert running.number not in self.pages
        return self._take(running, running.length)

    def grow(self, running: Running) -> bool:
        return self._take(running, running.num_read + 1)

    def leave(self, running: Running) -> None:
        del self.pages[running.number]

    def waits_for(self, running: Running, other: Running) -> bool:
        return False


@given(REQUESTS, st.integers(1, 5), st.integers(1, 8), st.data())
def test_every_request_ends_whatever_is_thrown_out(
    sizes: list[tuple[int, int]], num_slots: int, page_size: int, data: st.DataObject
) -> None:
    requests = [
        GenerateRequest(
            number=n,
            prompt=(0,) * length,
            max_new_tokens=new,
            priority=data.draw(st.integers(0, 2)),
        )
        for n, (length, new) in enumerate(sizes)
    ]
    needs = [-(-r.num_positions // page_size) for r in requests]
    room = PagedRoom(num_slots, data.draw(st.integers(max(needs), sum(needs))), page_size)
    schedule = BatchScheduler(room)
    arriving, ended = list(requests), list[int]()
    while schedule.is_busy or arriving:
        for request in arriving[: data.draw(st.integers(0 if schedule.is_busy else 1, 3))]:
            arriving.remove(request)
            schedule.add(request)
        grown = schedule.rows_to_grow()
        for running in grown:
            running.num_read += 1
        schedule.enter()
        parts = schedule.rows_to_read()
        assert grown or parts, "work is left, and nobody does it"
        assert len(parts) * max((n for _, n in parts), default=0) <= 8
        assert len(schedule.running) <= num_slots
        assert set(room.pages) == {r.number for r in schedule.running.values()}
        for running, count in parts:
            running.num_read += count
            running.is_started = not running.num_unread
        for running in [*grown, *(r for r, _ in parts if r.is_started)]:
            assert running.num_read == running.length
            running.tokens.append(0)
            if len(running.tokens) == running.request.max_new_tokens:
                ended.append(running.number)
                schedule.leave(running)
    assert sorted(ended) == list(range(len(requests)))
    assert not room.pages


def test_the_least_important_is_thrown_out_and_read_again() -> None:
    room = PagedRoom(num_slots=3, num_pages=3, page_size=2)
    schedule = BatchScheduler(room)
    for number, priority in enumerate((0, 1, 0)):
        schedule.add(
            GenerateRequest(number=number, prompt=(0, 0), max_new_tokens=3, priority=priority)
        )
    assert [r.number for r in schedule.enter()] == [1, 0, 2]
    for running, count in schedule.rows_to_read():
        running.num_read, running.is_started = count, True
        running.tokens.append(7)
    grown = schedule.rows_to_grow()
    assert [r.number for r in grown] == [1]
    assert (schedule.num_preempted, schedule.num_waiting) == (2, 2)
    assert schedule.enter() == []
    schedule.leave(grown[0])
    assert [r.number for r in schedule.enter()] == [0]
    (again, count) = schedule.rows_to_read()[0]
    assert (again.number, again.tokens, count) == (0, [7], 3)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    schedule = BatchScheduler(PagedRoom(num_slots=2, num_pages=99, page_size=4))
    for number, length in enumerate((40, 3)):
        schedule.add(GenerateRequest(number=number, prompt=(0,) * length, max_new_tokens=1))
    schedule.enter()
    order = []
    for _ in range(3):
        for running, count in schedule.rows_to_read():
            order.append((running.number, count))
            running.num_read += count
            running.is_started = not running.num_unread
    assert order == [(0, 8), (1, 3), (0, 8)]


def test_a_request_that_never_fits_is_refused() -> None:
    request = GenerateRequest(number=4, prompt=(1,) * 50, max_new_tokens=20)
    with raises(UsageError, "4", "5 pages", "16"):
        Reservation(num_pages=4, page_size=16).check(request)


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
