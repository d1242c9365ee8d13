"""What a simulated process sees of time, of its own number, and of sizes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from megtool.checkpoint import copy, nested_runs
from megtool.checkpoint.storage import lock, memory_store
from megtool.checkpoint.transport import kernel_copy, work_units
from tests.support.simulation.scheduler import Scheduler

UNIT_BYTES, TILE_BYTES = 256, 128


class Violation(AssertionError):
    """Something that must hold after any history does not."""


class _ProcessSystem:
    """The module `os` as a simulated process sees it: with a number of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        """The number of the running process."""
        current = self._scheduler.current
        return current.number if current else 1

    def kill(self, number: int, signal: int) -> None:
        """Only the running processes live."""
        if not any(p.number == number and not p.is_dead for p in self._scheduler.alive):
            raise ProcessLookupError


@contextlib.contextmanager
def simulated(scheduler: Scheduler) -> Iterator[None]:
    """Let the engine run in simulated time, with units and tiles of a few hundred bytes."""
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        for target, name, value in (
            (lock, "time", scheduler.time),
            (lock, "os", _ProcessSystem(scheduler)),
            (nested_runs, "time", scheduler.time),
            (memory_store, "time", scheduler.time),
            (copy, "TILE_BYTES", TILE_BYTES),
            (work_units, "UNIT_BYTES", UNIT_BYTES),
            (kernel_copy, "UNIT_BYTES", UNIT_BYTES),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield
