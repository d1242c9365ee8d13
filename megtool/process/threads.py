"""Threads whose end is noticed even when there is no memory left to tell of it.

`threading.Thread.start` waits forever for a thread that dies of `MemoryError` before its first
line, and so does a future of a `ThreadPoolExecutor`. Here an object that only the thread refers to
tells whether it lives.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from megtool.errors import StorageError

Job = TypeVar("Job")
Result = TypeVar("Result")

_WAIT_SECONDS = 0.2

MOST_THREADS = 8
"""The most threads that are used unless the user asks for more."""


def count_threads() -> int:
    """Return how many threads work is shared among: one per core, at most eight."""
    return min(MOST_THREADS, os.cpu_count() or 1)


def run_in_threads(work: Callable[[], None], count: int, stopped: threading.Event) -> None:
    """Run `work` in `count` threads (in this one, for 1) until each returns.

    `work` must return soon after `stopped` is set. An error or Ctrl-C sets it, and the first error
    is raised.

    Raises:
        MemoryError: a thread ended for lack of memory.
        StorageError: the system starts no more threads.
    """
    if count < 2:
        work()
        return
    errors: list[BaseException] = []
    threads = [_WorkThread(work, errors, stopped) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        _wait(threads, stopped)
    except BaseException:
        stopped.set()
        _wait(threads, stopped)
        raise
    if errors:
        raise errors[0]
    if not all(thread.is_done for thread in threads):
        raise MemoryError("a thread ended for lack of memory")


def run_jobs(jobs: Sequence[Job], work: Callable[[Job], None], *, threads: int) -> None:
    """Run `work` on every job, roughly in order; the first error or Ctrl-C stops all.

    Raises:
        MemoryError, StorageError: as `run_in_threads`.
    """
    stopped, lock = threading.Event(), threading.Lock()
    queue = iter(jobs)

    def loop() -> None:
        while not stopped.is_set():
            with lock:
                job = next(queue, None)
            if job is None:
                return
            work(job)

    run_in_threads(loop, min(threads, len(jobs)), stopped)


def map_in_threads(
    work: Callable[[Job], Result], jobs: Sequence[Job], *, threads: int
) -> list[Result]:
    """The results of `work` on every job, in their order; the first error stops all.

    Raises:
        MemoryError, StorageError: as `run_in_threads`.
    """
    results: dict[int, Result] = {}

    def do(number: int) -> None:
        results[number] = work(jobs[number])

    run_jobs(range(len(jobs)), do, threads=threads)
    return [results[number] for number in range(len(jobs))]


def stream_in_threads(
    work: Callable[[Job], Result], jobs: Iterable[Job], *, threads: int, ahead: int = 0
) -> Iterator[Result]:
    """The results of `work` on every job, in order; `jobs` is consumed in the calling thread.

    At most `threads + ahead` jobs wait or are under way while a result is consumed. Threads keep
    running for all jobs, so they may hold what is theirs in a `threading.local`. The calling thread
    does the work itself for 1.

    Raises:
        MemoryError, StorageError: as `run_in_threads`.
    """
    if threads < 2:
        yield from map(work, jobs)
        return
    stopped = threading.Event()
    calls: SimpleQueue[_Call[Job, Result] | None] = SimpleQueue()
    errors: list[BaseException] = []

    def loop() -> None:
        while not stopped.is_set():
            with suppress(Empty):
                call = calls.get(timeout=_WAIT_SECONDS)
                if call is not None and not stopped.is_set():
                    call.run(work)

    workers = [_WorkThread(loop, errors, stopped) for _ in range(threads)]
    waiting: deque[_Call[Job, Result]] = deque()
    try:
        for worker in workers:
            worker.start()
        for job in jobs:
            waiting.append(_Call(job))
            calls.put(waiting[-1])
            if len(waiting) > threads + ahead:
                yield waiting.popleft().result(workers)
        while waiting:
            yield waiting.popleft().result(workers)
    finally:
        stopped.set()
        with suppress(MemoryError):  # without these they notice a moment later
            for _ in workers:
                calls.put(None)
        _wait(workers, stopped)


class BackgroundCall(Generic[Result]):
    """A call of `work` in a thread of its own, which begins at once.

    At its exit the interpreter waits for calls with `is_awaited`, and ends others.

    Raises:
        MemoryError, StorageError: as `run_in_threads`.
    """

    def __init__(self, work: Callable[[], Result], *, is_awaited: bool = True) -> None:
        self._work = work
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._thread = _WorkThread(self._run, self._errors, threading.Event())
        self._thread.start()
        if is_awaited:
            weakref.finalize(self, _wait, [self._thread], threading.Event())

    def _run(self) -> None:
        self._results.append(self._work())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the call, at most so long; whether it has ended."""
        if seconds is not None:
            return self._thread.wait(seconds)
        while not self._thread.wait(_WAIT_SECONDS):
            pass
        return True

    def result(self) -> Result:
        """The result of `work`, or its error, when it has ended.

        Raises:
            MemoryError: the thread ended for lack of memory.
        """
        self.wait()
        if self._errors:
            raise self._errors[0]
        if not self._thread.is_done:
            raise MemoryError("a thread ended for lack of memory")
        return self._results[0]


def _wait(threads: Sequence[_WorkThread], stopped: threading.Event) -> None:
    """Wait until all threads that were started have ended; one that fails stops all."""
    pending = list(threads)
    while pending:
        for thread in list(pending):
            if thread.wait(_WAIT_SECONDS):
                pending.remove(thread)
                if not thread.is_done:
                    stopped.set()


class _Call(Generic[Job, Result]):
    """One job for a thread, and its result."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self, work: Callable[[Job], Result]) -> None:
        """Do the job; an error is kept for `result`."""
        try:
            self._results.append(work(self._job))
        except BaseException as e:
            self._error = e
        self._done.release()

    def result(self, workers: Sequence[_WorkThread]) -> Result:
        """Wait for the result, or raise the error; no one of `workers` ends before it is done."""
        while not self._done.acquire(timeout=_WAIT_SECONDS):
            if any(worker.wait(0) for worker in workers):
                raise MemoryError("a thread ended for lack of memory")
        if self._error is not None:
            raise self._error
        return self._results.pop()


class _Alive:
    """Exists while a thread runs, however it ends."""

    __slots__ = ("__weakref__",)


class _WorkThread:
    """One thread that runs `work`."""

    def __init__(
        self, work: Callable[[], None], errors: list[BaseException], stopped: threading.Event
    ) -> None:
        self._work, self._errors, self._stopped = work, errors, stopped
        self._alive: Callable[[], _Alive | None] = lambda: None
        self._ended = threading.Lock()
        self.is_done = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            StorageError: the system starts no more threads.
        """
        alive = _Alive()
        self._alive = weakref.ref(alive)
        self._ended.acquire()
        try:
            _thread.start_new_thread(self._run, (alive,))
        except MemoryError:
            self._ended.release()
            raise
        except RuntimeError as e:
            self._ended.release()
            raise StorageError(
                f"no thread can be started: {e}",
                hint="raise the limit of processes (ulimit -u) or memory, or use 1 thread",
            ) from e

    def wait(self, seconds: float) -> bool:
        """Wait for so long; whether the thread has ended, or never began."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()
            return True
        return self._alive() is None

    def _run(self, alive: _Alive) -> None:
        try:
            self._work()
            self.is_done = True
        except BaseException as e:
            self._errors.append(e)
            self._stopped.set()
        finally:
            self._ended.release()
