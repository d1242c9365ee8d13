"""What a simulated process sees of time, of its own number, and of sizes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from megtool.plan import execute, work_units
from megtool.process import threads as work_threads
from megtool.staging import nested_runs
from megtool.storage import lock
from megtool.storage.objects import index as store_index
from megtool.storage.objects import lease, open_objects, part_layout
from megtool.storage.objects import probe as store_probe
from megtool.storage.stores import memory as memory_store
from tests.support.simulation.scheduler import Scheduler

UNIT_BYTES, TILE_BYTES, PART_BYTES = 256, 128, 200


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


class _StoreClock:
    """The clock of a store, which does not jump."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def time_ns(self) -> int:
        """The time of a request."""
        return int(self._scheduler.seconds * 1e9) + 10**18


class _NoThreads:
    """The module `threading` for a lease that is not renewed: runs are short, or stall whole."""

    Event = threading.Event

    class Thread:
        """A thread that does nothing."""

        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            """Do nothing."""


@contextlib.contextmanager
def separate_processes(scheduler: Scheduler) -> Iterator[None]:
    """Let every simulated process have its own memory of what stores said, and its own objects."""

    def of_process(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
        idle = make()

        def find() -> Any:
            process = scheduler.current
            if process is None:
                return idle
            if name not in process.memory:
                process.memory[name] = make()
            return process.memory[name]

        return find

    class Probed(dict[Any, Any]):
        """What was found out about stores in the running process."""

        def get(self, key: Any, default: Any = None) -> Any:
            return probed().get(key, default)

        def __setitem__(self, key: Any, value: Any) -> None:
            probed()[key] = value

    probed = of_process("probed", dict)
    makers = {
        "store_index": of_process("store_index", store_index.StoreIndex),
        "open_objects": of_process("open_objects", open_objects.OpenObjects),
    }
    originals = {"store_index": store_index.store_index, "open_objects": open_objects.open_objects}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(store_probe, "_PROBED", Probed()))
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("megtool.")]:
            for name, maker in makers.items():
                if vars(module).get(name) is originals[name]:
                    stack.enter_context(patch.object(module, name, maker))
        yield


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
            (memory_store, "time", _StoreClock(scheduler)),
            (lease, "os", _ProcessSystem(scheduler)),
            (lease, "time", scheduler.time),
            (lease, "threading", _NoThreads),
            (lease, "_boot_id", lambda: "simulated"),
            (part_layout, "PART_BYTES", PART_BYTES),
            (part_layout, "LEAST_BYTES", PART_BYTES),
            (work_threads, "run_in_threads", lambda work, count, stopped: work()),
            (execute, "TILE_BYTES", TILE_BYTES),
            (work_units, "UNIT_BYTES", UNIT_BYTES),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield
