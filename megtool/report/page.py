"""What is on a page: headline numbers, facts, and sections of figures, tables and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megtool.report.finding import Finding
from megtool.report.sections import Report, Row

Tone = Literal["", "good", "warning", "error"]

MAX_TABLE_ROWS = 100_000
"""Rows of a table on a page, so that a page stays small; the JSON of the command has all."""

MAX_BOXES = 1_200
"""Boxes of a treemap, so that it is drawn in less than a second."""

MAX_GAPS = 6_000
"""Cells of a grid that are drawn with gaps between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTile:
    """One of the numbers at the top of a page."""

    label: str
    value: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFigure:
    """A plot: traces and layout of plotly.js (see `megtool/report/figures.py`).

    `variants` are the traces by the name that a reader chooses; with a single one there is nothing
    to choose. `description` says in a sentence what it shows, for those who do not see it.
    Two figures that are `is_narrow` are side by side where there is room.
    """

    title: str
    description: str
    variants: Mapping[str, Sequence[Mapping[str, Any]]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 380
    is_narrow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumn:
    """A column of a table; `kind` says how its values are shown, and that numbers are sorted as
    such. `bins` are pairs of a power of two and a count, shown as a histogram on demand."""

    name: str
    kind: Literal["text", "code", "number", "count", "bytes", "share", "bins", "tone"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Rows that a reader filters and sorts; `note` is what the table leaves out, or how to read it.

    A table that `is_open` shows its rows at once.
    """

    title: str
    columns: Sequence[PageColumn]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    is_open: bool = True

    @property
    def page_rows(self) -> Sequence[Sequence[Any]]:
        """The rows that the page has."""
        return self.rows[:MAX_TABLE_ROWS]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A heading with a text and what belongs to it."""

    title: str
    text: str = ""
    facts: Sequence[Row] = ()
    findings: Sequence[Finding] | None = None
    blocks: Sequence[PageFigure | PageTable] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: everything is text or numbers; the template knows no command.

    `data` is the report as `--json` prints it, and is a part of the page.
    """

    title: str
    command: str
    tiles: Sequence[PageTile] = ()
    facts: Sequence[Row] = ()
    sections: Sequence[PageSection] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def text_page(report: Report, command: str) -> Page:
    """The page of a report that has no figures: the text of the command, its tables as tables."""
    sections = [
        PageSection(
            title=part.title or "Details",
            facts=part.rows,
            blocks=[
                PageTable(
                    title=part.title or "Details",
                    columns=[PageColumn(name=name) for name in part.table.header],
                    rows=part.table.rows,
                )
            ]
            if part.table is not None and part.table.header
            else (),
        )
        for part in report.sections()
        if part.rows or (part.table is not None and part.table.header)
    ]
    return Page(
        title=report.title(),
        command=command,
        facts=[*report.rows(), *(("note", note) for note in report.notes)],
        sections=sections,
        data=report.to_json(),
    )
