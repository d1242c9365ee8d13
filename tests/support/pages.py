"""A page with every kind of figure, a table and findings."""

from __future__ import annotations

from typing import Any

from megtool.report.figures import (
    HeatGrid,
    LineSeries,
    TreeNode,
    bar_figure,
    flow_figure,
    heat_figure,
    line_figure,
    treemap,
)
from megtool.report.finding import Finding
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
)

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&"
NODES = [
    TreeNode(path="m", parent="", label="m", size=3),
    TreeNode(path="m.a", parent="m", label="a", size=2),
    TreeNode(path="m.b", parent="m", label=HOSTILE, size=1),
]
FIGURES: tuple[PageFigure, ...] = (
    treemap("tree", "three boxes", NODES, unit="bytes"),
    bar_figure("bars", "two", [("a", 1.0, "one"), ("b", float("inf"), "many")]),
    line_figure(
        "lines",
        "two series",
        {"x": [LineSeries(name="s", x=[1, 2], y=[1.0, None])], "y": []},
        x="layer",
        y="std",
    ),
    heat_figure(
        "cells", "a row", {"": HeatGrid(rows=["r"], columns=["c"], values=[[1.0]])}, x="x", y="y"
    ),
    flow_figure("flow", "one band", ["a", "b"], [(0, 1, 5.0, "5")]),
)


def make_page(name: str = "layers.0", **changes: Any) -> Page:
    rows = [(name, 5, 0.5, [-2, [1], 0, [2]])]
    columns = [
        PageColumn(name="tensor", kind="code"),
        PageColumn(name="bytes", kind="bytes"),
        PageColumn(name="zeros", kind="share"),
        PageColumn(name="histogram", kind="bins"),
    ]
    table = PageTable(title="Tensors", columns=columns, rows=rows)
    finding = Finding(id="x", severity="error", module=name, message=name, hint="look")
    sections = [
        PageSection(title="Figures", blocks=[*FIGURES, table]),
        PageSection(title="Findings", findings=[finding]),
        PageSection(title="None", findings=[]),
    ]
    data = {"name": name, "value": float("nan")}
    return Page(
        title=name,
        command="inspect",
        tiles=[PageTile(label="bytes", value=name)],
        facts=[("family", name)],
        sections=sections,
        data=data,
        **changes,
    )
