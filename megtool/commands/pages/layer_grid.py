"""Values of tensors as a grid: a row for every kind of module, a column for every layer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megtool.report.figures import HeatGrid

_LAYER = re.compile(r"(?:^|[./:])(?:layers?|h|blocks?|blk)[./](\d+)[./]")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")

OUTSIDE = "-"
"""The column of what is in no layer."""


def layer_grid(
    values: Mapping[str, float | None],
    *,
    unit: str = "",
    scale: str = "@sequential",
    texts: Mapping[str, str] | None = None,
    is_worst: bool = True,
) -> HeatGrid:
    """A grid of values by tensor name; None is an empty cell.

    Where several tensors share a cell, such as the experts of a layer, it has the largest value
    (with `is_worst` false, the smallest), and the text of that tensor.
    """
    cells: dict[tuple[str, str], tuple[float, str]] = {}
    rows: dict[str, None] = {}
    columns: set[str] = set()
    for name, value in values.items():
        role, layer = split_layer(name)
        rows.setdefault(role)
        columns.add(layer)
        if value is None:
            continue
        before = cells.get((role, layer))
        if before is None or (value > before[0]) == is_worst:
            text = (texts or {}).get(name, f"{value:.5g}")
            cells[role, layer] = value, f"{name}\n{text}"
    ordered = sorted(columns, key=lambda c: (c == OUTSIDE, int(c) if c.isdecimal() else 0))
    return HeatGrid(
        rows=list(rows),
        columns=ordered,
        values=[[cells.get((r, c), (None, ""))[0] for c in ordered] for r in rows],
        texts=[[cells.get((r, c), (None, ""))[1] for c in ordered] for r in rows],
        scale=scale,
        unit=unit,
    )


def split_layer(name: str) -> tuple[str, str]:
    """The kind of a tensor, numbers of experts left out, and its layer."""
    match = _LAYER.search(name)
    if match is None:
        return name.removesuffix(".weight"), OUTSIDE
    role = name[: match.start(1)] + name[match.end(1) + 1 :]
    role = _NUMBERS.sub("*", role).removesuffix(".weight")
    return re.sub(r"(?:^|(?<=[.:]))(?:model\.)?layers\.", "", role), match[1]
