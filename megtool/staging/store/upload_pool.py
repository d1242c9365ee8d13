"""Threads that upload parts of objects, while those that fill the parts go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from megtool.errors import StorageError
from megtool.process.threads import BackgroundCall

_WAIT_SECONDS = 0.2


class UploadPool:
    """Runs jobs in up to `threads` threads; with fewer than 2, in the calling thread.

    Jobs that wait or are under way have at most `most_bytes` in all, or are one: who brings more
    waits. Threads are started when there is work for them. Thread-safe.
    """

    def __init__(self, threads: int, most_bytes: int) -> None:
        self._most_threads = threads if threads > 1 else 0
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._threads: list[BackgroundCall[None]] = []
        self._num_bytes = self._num_jobs = self._num_done = self._num_idle = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def is_parallel(self) -> bool:
        """Whether threads of its own upload."""
        return self._most_threads > 0

    def run(self, num_bytes: int, job: Callable[[], None]) -> None:
        """Run a job that has so many bytes in memory, at some time before `settle` returns.

        Raises:
            MemoryError, StorageError: no thread can be started, or one has died.
            BaseException: the first error of an earlier job; this one is not run.
        """
        if not self._most_threads:
            job()
            return
        with self._changed:
            self._wait(lambda: self._num_jobs and self._num_bytes + num_bytes > self._most_bytes)
            self._waiting.append((num_bytes, job))
            self._num_bytes += num_bytes
            self._num_jobs += 1
            is_short = len(self._waiting) > self._num_idle
            if is_short and len(self._threads) < self._most_threads:
                self._start()
            self._changed.notify_all()

    def wait_for_one(self) -> bool:
        """Wait until a job that was under way is done; False if there was none.

        Raises:
            MemoryError: a thread has died.
            BaseException: the first error of a job.
        """
        with self._changed:
            done, is_busy = self._num_done, self._num_jobs > 0
            self._wait(lambda: self._num_jobs and self._num_done == done)
            return is_busy

    def settle(self) -> None:
        """Wait until all jobs are done.

        Raises:
            MemoryError: a thread has died.
            BaseException: the first error of a job.
        """
        with self._changed:
            self._wait(lambda: self._num_jobs)

    def close(self) -> None:
        """Drop the jobs that wait, and wait for those under way; errors are dropped, too."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.wait()
        self._threads.clear()

    def _wait(self, is_busy: Callable[[], object]) -> None:
        """Wait while it `is_busy`; an error ends it."""
        while self._error is None and is_busy():
            if not self._changed.wait(_WAIT_SECONDS):
                self._check_threads()
        if self._error is not None:
            raise self._error

    def _check_threads(self) -> None:
        for thread in self._threads:
            if not self._is_closed and thread.wait(0):
                thread.result()  # of one that has died, the reason
                raise MemoryError("a thread ended for lack of memory")

    def _start(self) -> None:
        try:
            self._threads.append(BackgroundCall(self._work, is_awaited=False))
        except (MemoryError, StorageError):
            if not self._threads:
                self._num_bytes -= self._waiting.pop()[0]
                self._num_jobs -= 1
                raise

    def _work(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._waiting:
                    return
                num_bytes, job = self._waiting.popleft()
                is_dropped = self._error is not None
            error: BaseException | None = None
            if not is_dropped:
                try:
                    job()
                except BaseException as e:
                    error = e
            del job
            with self._changed:
                self._num_bytes -= num_bytes
                self._num_jobs -= 1
                self._num_done += 1
                self._error = self._error or error
                self._changed.notify_all()
