"""Which parts and digests each unit of a plan has contributed to, for the journal in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megtool.staging.store.journal import UnitRecord

Place = tuple[int, int]
"""A part: the number of its file, and its own in the file."""


class UnitTracker:
    """Notes what the unit of each thread writes; a unit is done when its parts are uploaded.

    A thread does one unit after another, so what it writes and digests until `finish` belongs to
    that unit. `add` is called with the record of a unit that is done.
    """

    def __init__(self, add: Callable[[UnitRecord], None]) -> None:
        self._add = add
        self._local = threading.local()
        self._waiting: dict[Place, list[tuple[UnitRecord, set[Place]]]] = {}
        self._lock = threading.Lock()

    def _record(self) -> UnitRecord:
        record: UnitRecord | None = getattr(self._local, "record", None)
        if record is None:
            record = self._local.record = UnitRecord(unit=-1)
        return record

    def forget(self) -> None:
        """Forget what this thread wrote outside of units."""
        self._local.record = None

    def note_section(self, file: int, section: int, linear: int) -> None:
        """This thread has added to the digest of a section of a file."""
        sections = self._record().sections
        sections[file, section] = sections.get((file, section), 0) ^ linear

    def note_tensor(self, name: str, linear: int, num_bytes: int) -> None:
        """This thread has added to the digest of a tensor."""
        tensors = self._record().tensors
        crc, done = tensors.get(name, (0, 0))
        tensors[name] = crc ^ linear, done + num_bytes

    def touch(self, place: Place) -> None:
        """This thread has written to a part."""
        self._record().parts.add(place)

    def finish(self, unit: int, note: str, is_uploaded: Callable[[Place], bool]) -> None:
        """This thread has done a unit."""
        record, self._local.record = self._record(), None
        record.unit, record.note = unit, note
        with self._lock:
            missing = {place for place in record.parts if not is_uploaded(place)}
            for place in missing:
                self._waiting.setdefault(place, []).append((record, missing))
        if not missing:
            self._add(record)

    def uploaded(self, place: Place) -> None:
        """A part is in the store, so units that waited for it may be done."""
        with self._lock:
            rows = self._waiting.pop(place, [])
            for _, missing in rows:
                missing.discard(place)
            done = [record for record, missing in rows if not missing]
        for record in done:
            self._add(record)
