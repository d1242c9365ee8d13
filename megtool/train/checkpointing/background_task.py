"""Behind: one piece of work at a time in a thread, with errors that come up where one looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BackgroundTask:
    """Work behind training: a copy of what training is about to change, then all that follows.

    Used from one thread; an error of the work waits for `check`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._copied: threading.Event | None = None
        self._error: BaseException | None = None

    def start(self, copy: Callable[[], None] | None, work: Callable[[], None], name: str) -> None:
        """Begin with `copy`, if any, and go on with `work`; nothing may be under way."""
        copied = self._copied = threading.Event()

        def run() -> None:
            try:
                try:
                    if copy is not None:
                        copy()
                finally:
                    copied.set()
                work()
            except BaseException as e:  # it is raised where training looks: `check`
                self._error = e

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Something is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait_for_copy(self) -> float:
        """Wait until the copy is made; returns the seconds of it."""
        began = time.monotonic()
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
        return time.monotonic() - began

    def check(self) -> None:
        """Raise what went wrong since the last call, once; costs nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the work, as long as that, and raise what went wrong."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
        self.check()
