"""Threads that cannot start, or die without a word: the caller is told, and never waits forever."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megtool.errors import StorageError
from megtool.process.threads import (
    BackgroundCall,
    map_in_threads,
    run_in_threads,
    stream_in_threads,
)
from tests.support.errors import raises
from tests.support.threads import kill_threads, refuse_threads


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
    kill_threads(monkeypatch, {3, 4})
    stopped = threading.Event()
    with pytest.raises(MemoryError):
        run_in_threads(lambda: stopped.wait(20), 4, stopped)
    assert stopped.is_set()


class Unappendable(list[Any]):
    """A list that has no memory for an item."""

    def append(self, item: Any) -> None:
        raise MemoryError


def test_an_error_that_finds_no_memory_is_none_the_less_an_error() -> None:
    from megtool.process import threads as work_threads

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


# ---- streams


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_streamed_results_are_in_order(threads: int) -> None:
    def work(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        return number * number

    results = stream_in_threads(work, iter(range(50)), threads=threads, ahead=2)
    assert list(results) == [n * n for n in range(50)]
    assert list(stream_in_threads(work, [], threads=threads)) == []


def test_a_stream_reads_a_few_jobs_ahead_and_stops_with_its_reader() -> None:
    taken: list[int] = []
    running = threading.active_count()

    def jobs() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    stream = stream_in_threads(lambda n: n, jobs(), threads=3, ahead=2)
    assert [next(stream), next(stream)] == [0, 1]
    assert len(taken) <= 8
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == running


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_results_before_an_error_are_streamed(threads: int, error: type[Exception]) -> None:
    def work(number: int) -> int:
        if number == 5:
            raise error
        return number

    done = []
    with pytest.raises(error):  # noqa: PT012
        for result in stream_in_threads(work, range(1000), threads=threads, ahead=3):
            done.append(result)
    assert done == [0, 1, 2, 3, 4]


def test_an_error_of_the_jobs_ends_the_threads_of_a_stream() -> None:
    def jobs() -> Iterator[int]:
        yield from range(9)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(stream_in_threads(lambda n: n, jobs(), threads=3))


@pytest.mark.parametrize("dead", [{1}, {2}, {1, 2, 3}])
def test_a_stream_notices_dead_threads(dead: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kill_threads(monkeypatch, dead)
    busy = threading.Event()

    def work(number: int) -> int:
        if number == 2:
            busy.wait(1)
        return number

    with pytest.raises(MemoryError):
        list(stream_in_threads(work, range(9), threads=3))


def test_a_stream_without_threads_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, after=1)
    with raises(StorageError, "thread", hint="ulimit -u"):
        list(stream_in_threads(lambda n: n, range(9), threads=3))


# ---- single calls


def test_a_background_call_gives_its_result_or_error() -> None:
    assert BackgroundCall(lambda: 3).result() == 3
    call = BackgroundCall(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            call.result()


def test_a_background_call_can_be_waited_for() -> None:
    go = threading.Event()
    call = BackgroundCall(lambda: go.wait(20))
    assert not call.wait(0)
    go.set()
    assert call.wait()
    assert call.wait(0)


def test_a_dead_background_call_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_threads(monkeypatch, {1})
    with pytest.raises(MemoryError):
        BackgroundCall(lambda: 3).result()


def test_a_background_call_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    with raises(StorageError, "thread", hint="ulimit -u"):
        BackgroundCall(lambda: 3)


@pytest.mark.parametrize(("is_awaited", "printed"), [(True, "done"), (False, "")])
def test_the_interpreter_waits_for_calls_that_are_awaited(is_awaited: bool, printed: str) -> None:
    code = (
        "import time; from megtool.process.threads import BackgroundCall\n"
        "def work():\n    time.sleep(0.5); print('done', end='', flush=True)\n"
        f"call = BackgroundCall(work, is_awaited={is_awaited})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed
