"""Requests to stores in parallel, by threads that all readers share.

A caller takes part in its own work, so it ends even if the system starts no thread or one dies for
lack of memory before its first line.
"""

from __future__ import annotations

import _thread
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence

THREADS = 32
"""Threads that wait for stores, beside the callers."""


@functools.cache
def read_pool() -> ReadPool:
    """The pool of this process."""
    return ReadPool(THREADS)


class ReadPool:
    """Threads that are started when there is work for them, and stay."""

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads = self._idle = 0
        self._waiting: deque[_Batch] = deque()
        self._changed = threading.Condition()

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all jobs, in parallel, in the order given; the first error is raised at the end."""
        if len(jobs) == 1:
            jobs[0]()
            return
        batch = _Batch(jobs)
        with self._changed:
            num_jobs = min(len(jobs) - 1, self._most)
            for _ in range(num_jobs):
                self._waiting.append(batch)
            for _ in range(min(num_jobs - self._idle, self._most - self._threads)):
                self._start()
            self._changed.notify(num_jobs)
        batch.work()
        batch.wait()

    def _start(self) -> None:
        try:
            _thread.start_new_thread(self._loop, ())
        except RuntimeError:  # the system starts no more: the caller does the work
            return
        self._threads += 1

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting:
                    self._changed.wait()
                self._idle -= 1
                batch = self._waiting.popleft()
            batch.work()
            del batch


class _Batch:
    """Jobs that several threads work on."""

    def __init__(self, jobs: Sequence[Callable[[], None]]) -> None:
        self._jobs = deque(jobs)
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        """Run jobs until there are no more; after an error no more are begun."""
        while True:
            with self._changed:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running += 1
            error: BaseException | None = None
            try:
                job()
            except BaseException as e:
                error = e
            with self._changed:
                self._running -= 1
                if error is not None:
                    self._jobs.clear()
                    self._error = self._error or error
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait for the jobs of other threads, and raise the first error."""
        with self._changed:
            while self._running:
                self._changed.wait()
        if self._error is not None:
            raise self._error
