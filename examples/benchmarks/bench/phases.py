"""Phases: when the parts of a job began and ended, and the bytes they moved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Options = dict[str, Any]


class Phases:
    """When parts of the job began and ended (monotonic seconds), and the bytes they moved."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Note one part."""
        before, began = transferred(), time.monotonic()
        yield
        ended, after = time.monotonic(), transferred()
        moved = {k: after[k] - before[k] for k in after}
        self.seen[name] = {"began": began, "ended": ended, **moved}


def transferred() -> dict[str, int]:
    """Bytes this process read and wrote, by any call: `rchar` and `wchar` of /proc/self/io.

    The kernel counts read, write, sendfile and copy_file_range alike, in and out of the page cache.
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return {"read": int(counts["rchar"]), "written": int(counts["wchar"])}
