"""Reports of commands: plain data, and text for people; tables, counts and folded names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

_MAX_RANGES = 6
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,9}(?![0-9A-Za-z])")


class Report(ABC):
    """What a command returns; subclasses are dataclasses."""

    __slots__ = ()

    @property
    def exit_status(self) -> int:
        """What the command line exits with."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The human-readable report."""


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


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Align rows: the first `left` columns to the left, all others to the right.

    Rows may have different lengths.
    """
    width = [0] * max((len(row) for row in rows), default=0)
    for row in rows:
        for k, text in enumerate(row):
            width[k] = max(width[k], len(text))
    for row in rows:
        cells = (t.ljust(width[k]) if k < left else t.rjust(width[k]) for k, t in enumerate(row))
        yield "  ".join(cells).rstrip()


def count(number: int) -> str:
    """A count as text: `134.5 M`."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
