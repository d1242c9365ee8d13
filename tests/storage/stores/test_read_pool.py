"""Requests in parallel, with the caller's help."""

from __future__ import annotations

import threading

import pytest

from megtool.storage.stores import read_pool
from megtool.storage.stores.read_pool import ReadPool


def test_jobs_run_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=60)
    ReadPool(3).run([lambda: together.wait() and None for _ in range(4)])


def test_every_job_is_done_and_threads_stay() -> None:
    pool, done = ReadPool(2), list[int]()
    for start in range(0, 300, 100):
        pool.run([lambda n=n: done.append(n) for n in range(start, start + 100)])
    assert sorted(done) == list(range(300))
    assert pool._threads <= 2


def test_the_caller_works_alone_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(read_pool._thread, "start_new_thread", refuse)
    done = list[int]()
    ReadPool(8).run([lambda n=n: done.append(n) for n in range(5)])
    assert done == [0, 1, 2, 3, 4]


def test_the_first_error_is_raised_and_no_more_are_begun() -> None:
    done = list[int]()

    def job(n: int) -> None:
        if n == 3:
            raise ValueError("three")
        done.append(n)

    with pytest.raises(ValueError, match="three"):
        ReadPool(1).run([lambda n=n: job(n) for n in range(1000)])
    assert len(done) < 1000


def test_jobs_may_run_jobs() -> None:
    pool, done = ReadPool(2), list[int]()
    pool.run([lambda: pool.run([lambda: done.append(1)] * 5) for _ in range(5)])
    assert len(done) == 25
