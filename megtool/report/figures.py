"""Traces and layouts of plotly.js, as plain data.

Colors are slots (`@0` to `@7`, `@good`, `@warning`, `@error`, `@weak`, `@sequential`,
`@diverging`, `@alarm`), which the page replaces by those of its theme, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from megtool.report.page import MAX_BOXES, MAX_GAPS, PageFigure

NUM_COLORS = 8
"""Color slots of series; further series repeat them with dashes."""

_DASHES = ("solid", "dash", "dot", "dashdot")
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSeries:
    """Points of one line, `x` and `y`, each with a text that is shown on it."""

    name: str
    x: Sequence[float | int | str]
    y: Sequence[float | None]
    texts: Sequence[str] = ()
    is_marked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One box of a treemap: `parent` is the path of another, empty at the root; `size` is that of
    the box itself with all that is in it."""

    path: str
    parent: str
    label: str
    size: int
    text: str = ""
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatGrid:
    """A grid of colored cells: `values[row][column]`, None where there is nothing."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]] = ()
    scale: str = "@sequential"
    low: float | None = None
    high: float | None = None
    unit: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


def tidy(value: float | None) -> float | None:
    """A number that JSON can hold, with five digits; None for NaN and Inf."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def plain(text: str) -> str:
    """A text that plotly shows as it is: its labels may hold tags."""
    return escape(text, quote=False)


def line_traces(series: Sequence[LineSeries]) -> list[dict[str, Any]]:
    """Lines over `x`, one for each series."""
    traces: list[dict[str, Any]] = []
    for number, line in enumerate(series):
        has_many = len(line.x) > 1
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if line.is_marked or not has_many else "lines",
                "name": plain(line.name),
                "x": list(line.x),
                "y": [tidy(v) for v in line.y],
                "line": {
                    "color": f"@{number % NUM_COLORS}",
                    "width": 2,
                    "dash": _DASHES[number // NUM_COLORS % len(_DASHES)],
                },
                "marker": {"size": 6, "color": f"@{number % NUM_COLORS}"},
                "hovertemplate": "<b>%{fullData.name}</b><br>%{x}: %{y:.5~g}<extra></extra>",
            }
        )
        if line.texts:
            traces[-1] |= {
                "text": [plain(t) for t in line.texts],
                "hovertemplate": "%{text}<extra></extra>",
            }
    return traces


def line_figure(
    title: str,
    description: str,
    variants: Mapping[str, Sequence[LineSeries]],
    *,
    x: str,
    y: str,
    is_log: bool = False,
    is_narrow: bool = False,
) -> PageFigure:
    """Lines; a click on a name in the legend hides or shows its line."""
    axis: dict[str, Any] = {"title": {"text": y}}
    if is_log:
        axis |= {"type": "log", "exponentformat": "power", "dtick": 1}
    return PageFigure(
        title=title,
        description=description,
        variants={name: line_traces(series) for name, series in variants.items()},
        layout={
            "xaxis": {"title": {"text": x}},
            "yaxis": axis,
            "hovermode": "closest",
            "showlegend": any(len(series) > 1 for series in variants.values()),
        },
        height=280 if is_narrow else 380,
        is_narrow=is_narrow,
    )


def treemap(title: str, description: str, nodes: Sequence[TreeNode], *, unit: str) -> PageFigure:
    """Boxes within boxes; a click on one shows it alone. The largest are kept where there are very
    many: what is left out is a part of its parent's size."""
    shown = nodes
    if len(nodes) > MAX_BOXES:
        limit = sorted((n.size for n in nodes), reverse=True)[MAX_BOXES]
        shown = [n for n in nodes if n.size > limit]
        paths = {n.path for n in shown}
        shown = [n for n in shown if not n.parent or n.parent in paths]
    return PageFigure(
        title=title,
        description=description,
        variants={
            "": [
                {
                    "type": "treemap",
                    "branchvalues": "total",
                    "ids": [n.path for n in shown],
                    "parents": [n.parent for n in shown],
                    "labels": [plain(n.label) for n in shown],
                    "values": [n.size for n in shown],
                    "text": [plain(n.text) for n in shown],
                    "marker": {
                        "colors": [f"@{n.color % NUM_COLORS}" for n in shown],
                        "line": {"width": 1, "color": "@back"},
                        "pad": {"t": 22, "l": 3, "r": 3, "b": 3},
                    },
                    "textinfo": "label+text",
                    "textfont": {"color": "#ffffff"},
                    "hovertemplate": "<b>%{id}</b><br>%{text}<br>%{percentRoot:.1%} of all"
                    + f" {unit}<extra></extra>",
                    "maxdepth": 5,
                    "pathbar": {"visible": True, "thickness": 24},
                }
            ]
        },
        layout={"margin": {"t": 28, "l": 0, "r": 0, "b": 0}},
        height=520,
    )


def heat_trace(grid: HeatGrid) -> dict[str, Any]:
    """The cells of a grid, the first row on top."""
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": [plain(c) for c in grid.columns],
        "y": [plain(r) for r in grid.rows],
        "z": [[tidy(v) for v in row] for row in grid.values],
        "colorscale": grid.scale,
        "xgap": 1.5,
        "ygap": 1.5,
        "hoverongaps": False,
        "colorbar": {"thickness": 12, "outlinewidth": 0, "title": {"text": grid.unit}},
        "hovertemplate": "<b>%{y}</b>, %{x}: %{z:.5~g}<extra></extra>",
    }
    if grid.low is not None and grid.high is not None:
        trace |= {"zmin": tidy(grid.low), "zmax": tidy(grid.high)}
    if grid.texts:
        trace |= {
            "text": [[plain(t).replace("\n", "<br>") for t in row] for row in grid.texts],
            "hovertemplate": "%{text}<extra></extra>",
        }
    if len(grid.rows) * len(grid.columns) > MAX_GAPS:
        trace |= {"xgap": 0, "ygap": 0}
    return trace


def heat_figure(
    title: str, description: str, variants: Mapping[str, HeatGrid], *, x: str, y: str
) -> PageFigure:
    """Grids of colored cells, one at a time."""
    rows = max((len(grid.rows) for grid in variants.values()), default=1)
    return PageFigure(
        title=title,
        description=description,
        variants={name: [heat_trace(grid)] for name, grid in variants.items()},
        layout={
            "xaxis": {"title": {"text": x}, "type": "category", "showgrid": False},
            "yaxis": {
                "title": {"text": y},
                "type": "category",
                "autorange": "reversed",
                "showgrid": False,
            },
        },
        height=min(900, max(240, 150 + 24 * rows)),
    )


def bar_figure(
    title: str,
    description: str,
    bars: Sequence[tuple[str, float, str]],
    *,
    x: str = "",
    colors: Sequence[str] = (),
) -> PageFigure:
    """Horizontal bars, the first on top: name, value, and the text on it."""
    return PageFigure(
        title=title,
        description=description,
        variants={
            "": [
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": [plain(name) for name, _, _ in bars],
                    "x": [tidy(value) for _, value, _ in bars],
                    "text": [plain(text) for _, _, text in bars],
                    "textposition": "auto",
                    "cliponaxis": False,
                    "marker": {
                        "color": list(colors) or [f"@{i % NUM_COLORS}" for i in range(len(bars))],
                    },
                    "hovertemplate": "<b>%{y}</b>: %{text}<extra></extra>",
                }
            ]
        },
        layout={
            "xaxis": {"title": {"text": x}, "showticklabels": bool(x), "rangemode": "tozero"},
            "yaxis": {"autorange": "reversed", "type": "category"},
            "showlegend": False,
            "bargap": 0.3,
            **({} if x else {"margin": {"t": 30, "b": 12}}),
        },
        height=max(110, 60 + 34 * len(bars)),
    )


def flow_figure(
    title: str,
    description: str,
    names: Sequence[str],
    flows: Sequence[tuple[int, int, float, str]],
    *,
    colors: Sequence[str] = (),
) -> PageFigure:
    """Bands from nodes on the left to nodes on the right: `(from, to, size, text)`."""
    return PageFigure(
        title=title,
        description=description,
        variants={
            "": [
                {
                    "type": "sankey",
                    "node": {
                        "label": [plain(n) for n in names],
                        "color": list(colors) or "@0",
                        "pad": 12,
                        "thickness": 16,
                        "line": {"width": 0},
                        "hovertemplate": "<b>%{label}</b><extra></extra>",
                    },
                    "link": {
                        "source": [a for a, _, _, _ in flows],
                        "target": [b for _, b, _, _ in flows],
                        "value": [tidy(size) for _, _, size, _ in flows],
                        "customdata": [plain(text) for *_, text in flows],
                        "color": "@band",
                        "hovertemplate": "%{source.label} to %{target.label}<br>%{customdata}"
                        "<extra></extra>",
                    },
                }
            ]
        },
        layout={"margin": {"t": 10, "b": 10, "l": 10, "r": 10}},
        height=min(900, max(260, 60 + 18 * len(names))),
    )
