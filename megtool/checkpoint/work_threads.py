"""Threads whose end is noticed even when there is no memory left to tell of it.

`threading.Thread.start` waits forever for a thread that dies of `MemoryError` before its first
line, and so does a future of a `ThreadPoolExecutor`. Here an object that only the thread refers to
tells whether it lives.
"""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from megtool.errors import StorageError

Job = TypeVar("Job")
Result = TypeVar("Result")

_WAIT_SECONDS = 0.2


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


def _wait(threads: Sequence[_WorkThread], stopped: threading.Event) -> None:
    """Wait until all threads that were started have ended; one that fails stops all."""
    pending = list(threads)
    while pending:
        for thread in list(pending):
            if thread.wait(_WAIT_SECONDS):
                pending.remove(thread)
                if not thread.is_done:
                    stopped.set()


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
                hint="raise the limit of processes (ulimit -u) or memory; --threads 1 needs none",
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
