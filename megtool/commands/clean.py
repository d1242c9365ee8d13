"""List what interrupted runs have left, and remove it on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megtool.commands.options.checkpoints import CleanOptions
from megtool.console import format_bytes, several
from megtool.errors import DestinationError
from megtool.report.sections import Report, Row, Section, Table
from megtool.staging.left_overs import LeftOver, find_left_overs


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanReport(Report):
    """What was left, and with `is_removed` what of it is gone."""

    location: str
    left_overs: tuple[LeftOver, ...]
    removed: tuple[LeftOver, ...]
    is_removed: bool

    def to_json(self) -> dict[str, Any]:
        removed = set(map(id, self.removed))
        return self.add_remarks(
            {
                "location": self.location,
                "left_overs": [
                    {
                        "destination": str(row.destination),
                        "staging": None if row.staging is None else str(row.staging),
                        "contents": row.contents,
                        "num_bytes": row.num_bytes,
                        "holder": row.holder or None,
                        "removed": id(row) in removed,
                    }
                    for row in self.left_overs
                ],
            }
        )

    def title(self) -> str:
        if not self.left_overs:
            return f"{self.location}: no run has left anything"
        return f"{self.location}: {several(len(self.left_overs), 'run')} left something"

    def rows(self) -> Iterator[Row]:
        idle = [row for row in self.left_overs if not row.holder and row.is_removable]
        if self.is_removed:
            total = format_bytes(sum(row.num_bytes for row in self.removed))
            yield "removed", f"{len(self.removed)} of {len(self.left_overs)}, {total}"
        elif idle:
            total = format_bytes(sum(row.num_bytes for row in idle))
            yield "removable", f"{len(idle)} of {len(self.left_overs)}, {total}: add --yes"

    def sections(self) -> Iterator[Section]:
        removed = set(map(id, self.removed))
        rows = [
            (
                str(row.destination),
                row.contents,
                format_bytes(row.num_bytes),
                f"{row.holder} writes there"
                if row.holder
                else "removed"
                if id(row) in removed
                else "",
            )
            for row in self.left_overs
        ]
        if rows:
            yield Section(
                table=Table(header=("destination", "left", "size", ""), rows=rows, left=2)
            )


def clean(options: CleanOptions) -> CleanReport:
    """List what interrupted runs have left for `location` and in it; with `yes`, remove it.

    What a live run holds stays, and so do uploads that no run of megtool has begun as far as can be
    told. Former contents of a destination that was being replaced are put back. Of a publication
    that is not complete, the objects at the destination are removed too.

    Raises:
        StorageError: a folder cannot be read or changed, or a store refused.
    """
    left_overs = find_left_overs(options.location)
    removed = []
    if options.yes:
        for number, row in enumerate(left_overs):
            if row.holder or not row.is_removable:
                continue
            try:
                row.remove()
            except DestinationError as e:
                if e.id != "destination-locked":
                    raise
                left_overs[number] = replace(row, holder="another process")
                continue
            removed.append(row)
    return CleanReport(
        location=str(options.location),
        left_overs=tuple(left_overs),
        removed=tuple(removed),
        is_removed=options.yes,
    )
