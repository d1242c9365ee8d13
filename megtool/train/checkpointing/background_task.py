"""A background thread that does one task at a time, and reports its errors when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BackgroundTask:
    """A task in the background of training: a copy of what training is about to change, then work.

    It is used from one thread; an error is raised by `check`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._copied: threading.Event | None = None
        self._error: BaseException | None = None

    def start(self, copy: Callable[[], None] | None, work: Callable[[], None], name: str) -> None:
        """Start with `copy`, if any, followed by `work`; no other task may be under way."""
        copied = self._copied = threading.Event()

        def run() -> None:
            try:
                try:
                    if copy is not None:
                        copy()
                finally:
                    copied.set()
                work()
            except BaseException as e:  # raised by `check`
                self._error = e

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a task is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait_for_copy(self) -> float:
        """Wait until the copy is complete; returns the seconds it took."""
        began = time.monotonic()
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
        return time.monotonic() - began

    def check(self) -> None:
        """Raise an error since the last call, once; takes no time."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the task, at most `timeout_s`, and raise its error."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
        self.check()
