"""A tree of tensor names for people: layers and experts folded, shapes and bytes beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megtool.log import format_bytes
from megtool.tensors.sharded import GlobalTensor

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Tensors whose names differ in numbers alone, with the same shape and dtype.

    `name` has each number that varies as `{0-29}` (or `{0,2,5}` where it has gaps).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    num_bytes: int


def fold(tensors: Sequence[GlobalTensor]) -> list[Fold]:
    """Fold tensors by name pattern, shape and dtype, in order of first appearance."""
    groups: dict[tuple[object, ...], list[GlobalTensor]] = defaultdict(list)
    for t in tensors:
        groups[_NUMBER.sub("{}", t.name), t.shape, t.dtype.name, t.packing].append(t)
    return [_fold(members) for members in groups.values()]


def _fold(members: list[GlobalTensor]) -> Fold:
    numbers = [[int(n) for n in _NUMBER.findall(t.name)] for t in members]
    pattern = _NUMBER.sub("\0", members[0].name)
    for column in zip(*numbers, strict=True):
        pattern = pattern.replace("\0", _span(sorted(set(column))), 1)
    first = members[0]
    return Fold(
        name=pattern,
        shape=first.shape,
        dtype=first.packing or first.dtype.name,
        count=len(members),
        num_bytes=sum(t.num_bytes for t in members),
    )


def _span(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}-{values[-1]}}}"
    return "{" + ",".join(str(v) for v in values) + "}"


def draw(folds: Sequence[Fold]) -> Iterator[str]:
    """Lines of an indented tree: one level per dotted part, parts with one child joined."""
    root: dict[str, object] = {}
    for f in folds:
        node = root
        parts = re.findall(r"(?:\{[^}]*\}|[^.{}])+", f.name)
        for part in parts[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                child = node[part] = {"": child}
            node = child
        leaf = node.setdefault(parts[-1], [])
        if isinstance(leaf, dict):
            leaf = leaf.setdefault("", [])
        if isinstance(leaf, list):
            leaf.append(f)
    rows = list(_rows(root, 0))
    width = max((len(label) for label, _ in rows), default=0)
    for label, f in rows:
        yield f"{label:<{width}}  {_facts(f)}" if f else label


def _rows(node: dict[str, object], depth: int) -> Iterator[tuple[str, Fold | None]]:
    for part, child in node.items():
        label, below = part, child
        while isinstance(below, dict) and len(below) == 1:
            name, below = next(iter(below.items()))
            label = f"{label}.{name}" if name else label
        pad = "  " * depth + (label or "·")
        if isinstance(below, dict):
            yield pad, None
            yield from _rows(below, depth + 1)
        elif isinstance(below, list):
            for f in below:
                yield pad, f


def _facts(f: Fold) -> str:
    shape = "×".join(str(n) for n in f.shape) or "scalar"
    times = f"  × {f.count}" if f.count > 1 else ""
    return f"{shape:<16} {f.dtype:<9} {format_bytes(f.num_bytes):>10}{times}"


def count(number: int) -> str:
    """A count for people: `134.5 M`."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
