"""Threads that share one queue of work: the first error, or Ctrl-C, stops them all."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_in_threads(work: Callable[[], None], count: int, stopped: threading.Event) -> None:
    """Run `work` in `count` threads (in this one, for 1) until each returns.

    `work` has to return soon once `stopped` is set, which an error or Ctrl-C does; then the first
    error is raised.
    """
    if count < 2:
        work()
        return
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)
            stopped.set()

    pool = [threading.Thread(target=guarded, daemon=True) for _ in range(count)]
    try:
        for thread in pool:
            thread.start()
        for thread in pool:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:
        stopped.set()
        for thread in pool:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]
