"""A background thread that does one task at a time, and reports its errors when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megtool.process.threads import BackgroundCall

_WAIT_SECONDS = 0.2


class BackgroundTask:
    """A task in the background of training: a copy of what training is about to change, then work.

    It is used from one thread; an error is raised by `check`.
    """

    def __init__(self) -> None:
        self._call: BackgroundCall[None] | None = None
        self._copied: threading.Event | None = None

    def start(self, copy: Callable[[], None] | None, work: Callable[[], None]) -> None:
        """Start with `copy`, if any, followed by `work`; no other task may be under way.

        Raises:
            StorageError: the system starts no more threads.
        """
        copied = self._copied = threading.Event()

        def run() -> None:
            try:
                if copy is not None:
                    copy()
            finally:
                copied.set()
            work()

        self._call = BackgroundCall(run, is_awaited=False)

    @property
    def is_busy(self) -> bool:
        """Whether a task is under way."""
        return self._call is not None and not self._call.wait(0)

    def wait_for_copy(self) -> float:
        """Wait until the copy is complete; returns the seconds it took."""
        began = time.monotonic()
        if self._copied is not None:
            while not self._copied.wait(_WAIT_SECONDS) and self.is_busy:
                pass  # a thread that ends for lack of memory may set nothing
            self._copied = None
        return time.monotonic() - began

    def check(self) -> None:
        """Raise an error since the last call, once; takes no time."""
        if self._call is not None and self._call.wait(0):
            call, self._call = self._call, None
            call.result()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the task, at most `timeout_s`, and raise its error."""
        if self._call is not None:
            self._call.wait(timeout_s)
        self.check()
