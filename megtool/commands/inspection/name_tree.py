"""A tree of tensor names: layers and experts folded, with shapes and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megtool.console import format_bytes
from megtool.report.sections import Table, number_span, shown
from megtool.tensors.sharded import GlobalTensor

MAX_LEVELS = 16
"""Deeper parts of a name are not split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFold:
    """Tensors whose names differ only in numbers, with the same shape and dtype.

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


def fold_tensors(tensors: Iterable[GlobalTensor]) -> list[NameFold]:
    """NameFold tensors by name pattern, shape and dtype, in order of first appearance."""
    groups: dict[tuple[object, ...], list[tuple[GlobalTensor, tuple[str, ...]]]] = defaultdict(list)
    for t in tensors:
        parts = tuple(t.name.split("."))
        pattern = tuple(None if _is_number(p) else p for p in parts)
        groups[pattern, t.shape, t.dtype.name, t.packing].append((t, parts))
    return [_fold(members) for members in groups.values()]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10


def _fold(members: list[tuple[GlobalTensor, tuple[str, ...]]]) -> NameFold:
    first, names = members[0][0], [parts for _, parts in members]
    columns = zip(*names, strict=True)
    return NameFold(
        parts=tuple(
            number_span(column) if _is_number(column[0]) else column[0] for column in columns
        ),
        shape=first.shape,
        dtype=first.packing or first.dtype.name,
        count=len(members),
        num_bytes=sum(t.num_bytes for t, _ in members),
    )


@dataclass(slots=True)
class _Node:
    """Names with the same prefix: those that end at this level, and longer ones."""

    folds: list[NameFold] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def draw_tree(folds: Iterable[NameFold]) -> Table:
    """An indented tree: one level per dotted part, parts with one child joined."""
    root = _Node()
    for f in folds:
        node = root
        head, tail = f.parts[: MAX_LEVELS - 1], f.parts[MAX_LEVELS - 1 :]
        for part in (*head, ".".join(tail)) if tail else head:
            node = node.children.setdefault(part, _Node())
        node.folds.append(f)
    rows = list(_rows(root, 0))
    return Table(rows=[(label, *_facts(f)) if f else (label,) for label, f in rows], left=3)


def _rows(node: _Node, depth: int) -> Iterator[tuple[str, NameFold | None]]:
    for part, child in node.children.items():
        label, descendant = part, child
        while len(descendant.children) == 1 and not descendant.folds:
            name, descendant = next(iter(descendant.children.items()))
            label = f"{label}.{name}"
        pad = "  " * depth + (label or "·")
        if not descendant.folds:
            yield pad, None
        for f in descendant.folds:
            yield pad, f
        yield from _rows(descendant, depth + 1)


def _facts(f: NameFold) -> tuple[str, ...]:
    times = (f"x {f.count}",) if f.count > 1 else ()
    return (shown(f.shape), f.dtype, format_bytes(f.num_bytes), *times)
