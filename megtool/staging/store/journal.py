"""The journal of a checkpoint that is written to a store: small objects beside the destination.

An object of a store cannot be appended to, so a journal is a series of objects, each with some
finished units and its own digest. The store's own list of uploaded parts is the truth: a unit
counts as finished only if every part that it wrote to is in that list.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megtool.digests.crc32c import crc32c, reject_constant
from megtool.storage.location.path import StorePath
from megtool.storage.objects.small_object import read_object

VERSION = 2
BATCH_UNITS = 16
"""Finished units that one object of the journal holds."""


@dataclass(slots=True, kw_only=True)
class UnitRecord:
    """A finished unit: the parts that it wrote to, and what it added to digests.

    `parts` are numbers of files and of parts in them, `objects` the versions of files that were put
    whole, `tensors` the linear CRC and bytes by canonical tensor, `sections` the linear CRC by file
    and section (see `FileDigests`).
    """

    unit: int
    note: str = ""
    parts: set[tuple[int, int]] = field(default_factory=set)
    objects: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    sections: dict[tuple[int, int], int] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        """The record as plain data."""
        return [
            self.unit,
            self.note,
            sorted(self.parts),
            sorted(self.objects.items()),
            {name: list(value) for name, value in sorted(self.tensors.items())},
            [[file, section, crc] for (file, section), crc in sorted(self.sections.items())],
        ]


def parse_unit(values: Any) -> UnitRecord:
    """Parse a record.

    Raises:
        ValueError, TypeError: it is no record.
    """
    unit, note, parts, objects, tensors, sections = values
    if not isinstance(unit, int) or not isinstance(note, str) or not isinstance(tensors, Mapping):
        raise ValueError("no record of a unit")
    return UnitRecord(
        unit=unit,
        note=note,
        parts={(int(file), int(part)) for file, part in parts},
        objects={int(file): str(version) for file, version in objects},
        tensors={str(name): (int(crc), int(n)) for name, (crc, n) in tensors.items()},
        sections={(int(file), int(section)): int(crc) for file, section, crc in sections},
    )


class StoreJournal:
    """Finished units of one worker, in objects below `folder`. Thread-safe."""

    def __init__(self, folder: StorePath, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._pending: list[UnitRecord] = []
        self._next = 0
        self._lock = threading.Lock()

    def read(self) -> Iterator[UnitRecord]:
        """The units that earlier runs of this plan have finished.

        Damaged objects are skipped: their units are done again.

        Raises:
            StorageError: the store refused.
        """
        for info in self._folder.store.list(self._folder.key, recursive=True).objects:
            number = info.key.rpartition("/")[2]
            if number.isdecimal():
                self._next = max(self._next, int(number) + 1)
            yield from self._parse(read_object(self._folder / number, info) or b"")

    def _parse(self, data: bytes) -> list[UnitRecord]:
        body, end = data[:-9], data[-9:]
        if end != b"%08x\n" % crc32c(body):
            return []
        try:
            values = json.loads(body, parse_constant=reject_constant)
            if values["version"] != VERSION or values["fingerprint"] != self._fingerprint:
                return []
            return [parse_unit(row) for row in values["units"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []

    def add(self, record: UnitRecord) -> None:
        """Record a finished unit; it is in the store after `flush`.

        Raises:
            StorageError: the store refused.
        """
        with self._lock:
            self._pending.append(record)
            is_full = len(self._pending) >= BATCH_UNITS
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded.

        Raises:
            StorageError: the store refused.
        """
        with self._lock:
            rows, self._pending = self._pending, []
            number, self._next = self._next, self._next + bool(rows)
        if not rows:
            return
        values = {
            "version": VERSION,
            "fingerprint": self._fingerprint,
            "units": [row.to_json() for row in rows],
        }
        data = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        path = self._folder / f"{number:06}"
        path.store.put(path.key, data + b"%08x\n" % crc32c(data))
