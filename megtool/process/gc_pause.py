"""A pause of Python's garbage collection while many objects are made that stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: list[bool] = []
"""One for each pause of a thread; the first says whether collection was on before."""


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Beside imported torch a full collection takes 0.15 s, and the objects of a plan, or of the files
    that it opens, set it off.
    """
    with _lock:
        _pauses.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_enabled = _pauses.pop(0)
            if _pauses:
                _pauses[0] = was_enabled
            elif was_enabled:
                gc.enable()
