"""A tree of tensor names for people: layers and experts folded, shapes and bytes beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megtool.console import format_bytes
from megtool.tensors.sharded import GlobalTensor

MOST_LEVELS = 16
"""Deeper parts of a name are not split."""

_MOST_RANGES = 6
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]{1,9}(?![0-9A-Za-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Tensors whose names differ in numbers alone, with the same shape and dtype.

    `parts` are the dotted parts of the name, each number that varies as `{0-29}` (or `{0-2,5}`
    where it has gaps).
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    count: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The parts, joined."""
        return ".".join(self.parts)

    def to_json(self) -> dict[str, Any]:
        """The fold as plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "count": self.count,
            "bytes": self.num_bytes,
        }


def fold(tensors: Iterable[GlobalTensor]) -> list[Fold]:
    """Fold tensors by name pattern, shape and dtype, in order of first appearance."""
    groups: dict[tuple[object, ...], list[tuple[GlobalTensor, tuple[str, ...]]]] = defaultdict(list)
    for t in tensors:
        parts = tuple(t.name.split("."))
        pattern = tuple(None if _is_number(p) else p for p in parts)
        groups[pattern, t.shape, t.dtype.name, t.packing].append((t, parts))
    return [_fold(members) for members in groups.values()]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10


def _fold(members: list[tuple[GlobalTensor, tuple[str, ...]]]) -> Fold:
    first, names = members[0][0], [parts for _, parts in members]
    columns = zip(*names, strict=True)
    return Fold(
        parts=tuple(_span(column) if _is_number(column[0]) else column[0] for column in columns),
        shape=first.shape,
        dtype=first.packing or first.dtype.name,
        count=len(members),
        num_bytes=sum(t.num_bytes for t, _ in members),
    )


def fold_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that differ in numbers alone as one pattern, and how many there are of each."""
    groups: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for name in names:
        groups[tuple(_NUMBER.split(name))].append(_NUMBER.findall(name))
    out = []
    for texts, numbers in groups.items():
        spans = [_span(column) for column in zip(*numbers, strict=True)]
        pattern = "".join(t + s for t, s in zip(texts, [*spans, ""], strict=True))
        out.append((pattern, len(numbers)))
    return out


def _span(column: Sequence[str]) -> str:
    """Numbers as ranges: `{0-2,5}`; one that is alone as it is."""
    values = sorted({int(text) for text in column})
    if len(values) == 1:
        return column[0]
    ranges: list[list[int]] = []
    for n in values:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    if len(ranges) > _MOST_RANGES:
        return f"{{{values[0]},{values[1]},…,{values[-1]}}}"
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) + "}"


@dataclass(slots=True)
class _Node:
    """Names that begin alike: what ends here, and what goes on."""

    folds: list[Fold] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def draw(folds: Iterable[Fold]) -> Iterator[str]:
    """Lines of an indented tree: one level per dotted part, parts with one child joined."""
    root = _Node()
    for f in folds:
        node = root
        head, rest = f.parts[: MOST_LEVELS - 1], f.parts[MOST_LEVELS - 1 :]
        for part in (*head, ".".join(rest)) if rest else head:
            node = node.children.setdefault(part, _Node())
        node.folds.append(f)
    rows = list(_rows(root, 0))
    yield from columns([(label, *_facts(f)) if f else (label,) for label, f in rows], left=3)


def _rows(node: _Node, depth: int) -> Iterator[tuple[str, Fold | None]]:
    for part, child in node.children.items():
        label, below = part, child
        while len(below.children) == 1 and not below.folds:
            name, below = next(iter(below.children.items()))
            label = f"{label}.{name}"
        pad = "  " * depth + (label or "·")
        if not below.folds:
            yield pad, None
        for f in below.folds:
            yield pad, f
        yield from _rows(below, depth + 1)


def _facts(f: Fold) -> tuple[str, ...]:
    times = (f"x {f.count}",) if f.count > 1 else ()
    return (shown(f.shape), f.dtype, format_bytes(f.num_bytes), *times)


def shown(shape: Sequence[int]) -> str:
    """A shape for people: `[576, 64]`."""
    return str(list(shape))


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Rows as aligned text: the first `left` columns to the left, all others to the right.

    Rows may be of different lengths.
    """
    width = [0] * max((len(row) for row in rows), default=0)
    for row in rows:
        for k, text in enumerate(row):
            width[k] = max(width[k], len(text))
    for row in rows:
        cells = (t.ljust(width[k]) if k < left else t.rjust(width[k]) for k, t in enumerate(row))
        yield "  ".join(cells).rstrip()


def count(number: int) -> str:
    """A count for people: `134.5 M`."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
