"""Threads that cannot start, or die without a word: the caller is told, and never waits forever."""

from __future__ import annotations

import _thread
import threading
from typing import Any

import pytest

from megtool.checkpoint.work_threads import map_in_threads, run_in_threads
from megtool.errors import StorageError
from tests.support.errors import raises


@pytest.mark.parametrize("threads", [0, 1, 4, 50])
def test_results_are_in_order(threads: int) -> None:
    assert map_in_threads(lambda n: n * n, range(20), threads=threads) == [n * n for n in range(20)]
    assert map_in_threads(lambda n: n, [], threads=threads) == []
    assert map_in_threads(lambda n: n, [None, 3], threads=threads) == [None, 3]


@pytest.mark.parametrize("error", [MemoryError, ValueError, KeyboardInterrupt])
def test_the_first_error_stops_all(error: type[BaseException]) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 3:
            raise error
        done.append(number)

    with pytest.raises(error):
        map_in_threads(work, range(100_000), threads=3)
    assert len(done) < 100_000


def test_a_thread_that_dies_before_its_first_line_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, calls = _thread.start_new_thread, []

    def start_dead(function: Any, arguments: Any) -> int:
        calls.append(1)
        return start(function if len(calls) < 3 else (lambda alive: None), arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_dead)
    stopped = threading.Event()
    with pytest.raises(MemoryError):
        run_in_threads(lambda: stopped.wait(20), 4, stopped)
    assert stopped.is_set()


class Unappendable(list[Any]):
    """A list that has no memory for an item."""

    def append(self, item: Any) -> None:
        raise MemoryError


def test_an_error_that_finds_no_memory_is_none_the_less_an_error() -> None:
    from megtool.checkpoint import work_threads

    stopped = threading.Event()
    thread = work_threads._WorkThread(lambda: 1 // 0, Unappendable(), stopped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda _: None)
        thread.start()
        assert thread.wait(20)
    assert not thread.is_done


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_no_thread_to_be_had_is_one_sentence(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls, running = _thread.start_new_thread, [], []

    def refuse(function: Any, arguments: Any) -> int:
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("can't start new thread")
        return start(function, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    stopped = threading.Event()

    def work() -> None:
        running.append(1)
        stopped.wait(20)
        running.pop()

    with raises(StorageError, "thread", hint="ulimit -u"):
        run_in_threads(work, 4, stopped)
    assert running == []
