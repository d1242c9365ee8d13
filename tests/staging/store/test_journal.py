"""The objects of a store that a worker's finished units are written into."""

from __future__ import annotations

from typing import Any, cast

from megtool.staging.store.journal import StoreJournal, UnitRecord


class Folder:
    """A place in a store that notes what is put."""

    def __init__(self, key: str, written: dict[str, bytes]) -> None:
        self.key, self.written, self.store = key, written, self

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.key}/{name}", self.written)

    def put(self, key: str, data: bytes) -> None:
        assert key not in self.written
        self.written[key] = data


def test_each_flush_with_units_has_the_next_number() -> None:
    folder = Folder("run/units", {})
    journal = StoreJournal(cast(Any, folder), "plan")
    for units in ((1, 2), (), (3,), (4,)):
        for unit in units:
            journal.add(UnitRecord(unit=unit))
        journal.flush()
    assert list(folder.written) == [f"run/units/00000{n}" for n in range(3)]
