"""A store in memory whose requests fail, are repeated, lose their reply, or come from the dead."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from megtool.errors import StorageError
from megtool.storage.stores.memory import MemoryStore
from tests.support.simulation.scheduler import Process, Scheduler
from tests.support.stores.memory_stores import METHODS, VisibleStore

URL = "memory://simulated"
PART_BYTES = 200

INTRUDER = "run/out/deep/config.json"
"""What another program writes into the destination, against all rules."""

_READS = ("head", "list", "read", "list_parts", "list_uploads", "is_made_of")


class StoreFaults:
    """Faults of one process, by the number of its call.

    The call `number` has one of these ends: `refused` (503 until the client gives up), `lost` (it
    is executed, and the client gives up), `dead` (it is executed, and the process is gone). Of
    all calls a share of `repeats` is executed twice: the client repeats what has no reply.
    """

    def __init__(
        self, rng: random.Random, *, number: int = 0, end: str = "", repeats: float = 0.0
    ) -> None:
        self.rng, self.number, self.end, self.repeats = rng, number, end, repeats
        self.has_struck = False

    def draw(self, number: int) -> str:
        """What happens to this call."""
        if self.number and number >= self.number and not self.has_struck:
            self.has_struck = True
            return self.end
        return "repeated" if self.repeats and self.rng.random() < self.repeats else ""


class SimulatedStore(VisibleStore):
    """See `MemoryStore`. `uploaded` counts the parts that were accepted, by key and number.

    A part whose reply was lost does not count any more once its upload is aborted: who sent it did
    not know that it was there.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(URL, min_part_bytes=PART_BYTES)
        self.scheduler = scheduler
        self.faults: dict[Process, StoreFaults] = {}
        self.uploaded: Counter[tuple[str, int]] = Counter()
        self._unknown = set[tuple[str, int]]()
        self.observe: Callable[[], None] = lambda: None
        self.is_intruded = False
        self._is_inside = False

    def remove_intruder(self) -> bool:
        """Remove what another program has written, if it is still there; whether it was."""
        entry = self._objects.get(INTRUDER)
        is_there = self.is_intruded and entry is not None and entry[1] == b"of another program"
        if is_there:
            del self._objects[INTRUDER]
        self.is_intruded = False
        return is_there

    @property
    def open_uploads(self) -> list[str]:
        """Keys of uploads that are neither completed nor aborted."""
        return [upload.key for upload in self._uploads.values()]

    def request(self, name: str, inner: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """One request of the running process."""
        process = self.scheduler.current
        if self._is_inside or process is None:
            return inner(self, *args, **keywords)
        process.step()
        faults = self.faults.get(process)
        fault = faults.draw(process.calls) if faults else ""
        if fault == "refused":
            raise StorageError("the store is busy (503)", file=self.url)
        if name == "delete":  # no store deletes several objects at once
            keys = args[0]
            if fault == "dead" and faults is not None:
                keys = keys[: faults.rng.randint(0, len(keys))]
            for key in keys[:-1]:
                self._execute(inner, [key])
                self.observe()
            args = (keys[-1:],)
        if process.calls == process.intruded_at and INTRUDER not in self._objects:
            self.is_intruded = True
            self._store(INTRUDER, b"of another program")
        try:
            result = self._execute(inner, *args, **keywords)
            if fault == "repeated":
                result = self._execute(inner, *args, **keywords)
        finally:
            if name not in _READS:
                self.observe()
        if name in ("upload_part", "copy_part") and fault != "repeated":
            self.uploaded[args[0], args[2]] += 1
            if fault == "lost":
                self._unknown.add((args[0], args[2]))
        if name == "abort_upload":
            for place in {p for p in self._unknown if p[0] == args[0]}:
                self._unknown.remove(place)
                del self.uploaded[place]
        if fault == "lost":
            raise StorageError("the store did not answer", file=self.url)
        if fault == "dead":
            process.die()
        return result

    def _execute(self, inner: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self._is_inside = True
        try:
            return inner(self, *args, **keywords)
        finally:
            self._is_inside = False


def _requested(name: str) -> Callable[..., Any]:
    inner = getattr(MemoryStore, name)

    def method(self: SimulatedStore, *args: Any, **keywords: Any) -> Any:
        return self.request(name, inner, *args, **keywords)

    return method


for _name in METHODS:
    setattr(SimulatedStore, _name, _requested(_name))
