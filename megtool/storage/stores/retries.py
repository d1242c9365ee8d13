"""Attempts at requests, the pauses between them, and connections: the same for every client."""

from __future__ import annotations

import random
import time

ATTEMPTS = 8
"""Attempts at a request, about half a minute in all."""

CONNECTIONS = 128
"""Connections that a client keeps open."""


def pause(attempt: int, wish: str | None = None) -> None:
    """Sleep before a request is sent again, longer from attempt to attempt.

    `wish` is the server's `Retry-After`: whole seconds, of which at most 60 are heeded.
    """
    seconds = random.uniform(0.5, 1.0) * min(20.0, 0.2 * 2**attempt)
    if wish is not None and wish.isascii() and wish.isdigit():
        seconds = max(seconds, min(60.0, float(wish[:6])))
    time.sleep(seconds)
