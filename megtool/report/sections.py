"""Reports of commands: plain data, and text with rows and tables; counts and folded names."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from megtool.console import single_line

_MAX_RANGES = 6
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,9}(?![0-9A-Za-z])")
_LABEL_WIDTH = 10
_NAME_WIDTH = 24

Row = tuple[str, str]
"""A label and a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells below a header, if there is one; rows may have different lengths.

    The first `left` columns are aligned to the left, all others to the right. Columns of more than
    `MAX_ALIGNED` rows are separated by tabs.
    """

    MAX_ALIGNED = 2000

    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]]
    left: int = 1

    def lines(self, width: int | None = None, *, color: bool = False) -> Iterator[str]:
        """The table as text.

        `width` is that of a terminal, in which the first column is folded where that helps; without
        it, no line is. No line is shortened. With `color`, the header is bold.
        """
        everything = [self.header, *self.rows] if self.header else self.rows
        cells = [[single_line(cell).replace("\t", r"\t") for cell in row] for row in everything]
        if len(cells) > self.MAX_ALIGNED:
            yield from ("\t".join(row) for row in cells)
        elif cells:
            yield from self._draw(cells, width, color=color)

    def _draw(
        self, cells: Sequence[Sequence[str]], width: int | None, *, color: bool
    ) -> Iterator[str]:
        from io import StringIO

        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable.grid(padding=(0, 2, 0, 0))
        for number in range(max(map(len, cells))):
            left, is_name = number < self.left, number == 0
            table.add_column(
                justify="left" if left else "right", no_wrap=not is_name, overflow="fold"
            )
        for number, row in enumerate(cells):
            bold = bool(self.header) and number == 0
            table.add_row(*map(Text, row), style="bold" if bold else "")
        console = Console(
            file=StringIO(),
            width=1 << 30,
            force_terminal=color,
            color_system="standard" if color else None,
            legacy_windows=False,
        )
        natural = table.__rich_measure__(console, console.options).maximum
        names = max(Text(row[0]).cell_len for row in cells)
        if width is not None and natural - names + _NAME_WIDTH <= width < natural:
            table.width = width
        with console.capture() as captured:
            console.print(table, crop=False)
        yield from (line.rstrip() for line in captured.get().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report's text, after an empty line: a title, labeled rows, a table, and lines."""

    title: str = ""
    rows: Sequence[Row] = ()
    table: Table | None = None
    texts: Sequence[str] = ()

    def lines(self, width: int | None = None, *, color: bool = False) -> Iterator[str]:
        """The section as text; see `Table.lines`."""
        if self.title:
            yield single_line(self.title)
        label_width = max([_LABEL_WIDTH, *(len(label) for label, _ in self.rows)])
        for label, text in self.rows:
            yield single_line(f"  {label:<{label_width}}  {text}")
        if self.table is not None:
            yield from self.table.lines(width, color=color)
        yield from map(single_line, self.texts)


def flatten(values: dict[str, Any], name: str) -> dict[str, Any]:
    """`values` with the items of the mapping called `name` in its place."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= value if key == name else {key: value}
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(ABC):
    """What a command returns.

    `notes` are remarks of the command, and `warnings` those that it logged on the way. A report
    that `is_shown` has no text, as it is printed already, or by another process. `page` is the HTML
    file that it was also written to.
    """

    MAX_NOTES = 8

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_shown: bool = False
    page: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has the result, which of several processes only one has."""
        return not self.is_shown

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return self.add_remarks(asdict(self))

    @final
    def add_remarks(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` of a report, with notes and warnings at the end."""
        common: dict[str, Any] = {"notes": list(self.notes), "warnings": list(self.warnings)}
        if self.page is not None:
            common["page"] = self.page
        own = {k: v for k, v in values.items() if k not in (*common, "is_shown", "page")}
        return own | common

    @abstractmethod
    def title(self) -> str:
        """The first line of the text; there is none if it is empty."""

    def rows(self) -> Iterable[Row]:
        """Labels and texts below the title."""
        return ()

    @final
    def note_rows(self) -> Iterator[Row]:
        """The first notes, and how many more there are."""
        yield from (("note", note) for note in self.notes[: self.MAX_NOTES])
        if (more := len(self.notes) - self.MAX_NOTES) > 0:
            yield "note", f"and {more} more (--json lists them)"
        if self.page is not None:
            yield "page", self.page

    def sections(self) -> Iterable[Section]:
        """What follows the rows and the notes."""
        return ()

    @final
    def lines(self, width: int | None = None, *, color: bool = False) -> Iterator[str]:
        """The text: for a terminal of a `width`, or for a file."""
        if self.is_shown:
            return
        rows = [*self.rows(), *self.note_rows()]
        is_first = True
        for section in (Section(title=self.title(), rows=rows), *self.sections()):
            for number, line in enumerate(section.lines(width, color=color)):
                if number == 0 and not is_first:
                    yield ""
                yield line
                is_first = False


def finite_json(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as strings: `"nan"`, `"inf"`, `"-inf"`."""
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def fold_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Fold names that differ only in numbers into patterns, with the number of names of each."""
    groups: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for name in names:
        groups[tuple(_NUMBER.split(name))].append(_NUMBER.findall(name))
    patterns = []
    for texts, numbers in groups.items():
        spans = [number_span(column) for column in zip(*numbers, strict=True)]
        pattern = "".join(t + s for t, s in zip(texts, [*spans, ""], strict=True))
        patterns.append((pattern, len(numbers)))
    return patterns


def number_span(column: Sequence[str]) -> str:
    """Numbers as ranges, such as `{0-2,5}`; a single one as it is."""
    values = sorted({int(text) for text in column})
    if len(values) == 1:
        return column[0]
    ranges: list[list[int]] = []
    for n in values:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    if len(ranges) > _MAX_RANGES:
        return f"{{{values[0]},{values[1]},…,{values[-1]}}}"
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) + "}"


def shown(shape: Sequence[int]) -> str:
    """A shape as text: `[576, 64]`."""
    return str(list(shape))


def count(number: int) -> str:
    """A count as text: `134.5 M`."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
