"""Pages: one file that loads nothing, in which names stay text, with the facts as JSON."""

from __future__ import annotations

import base64
import builtins
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import MissingPackageError, StorageError
from megtool.pages.figures import (
    HeatGrid,
    LineSeries,
    TreeNode,
    bar_figure,
    flow_figure,
    heat_figure,
    line_figure,
    treemap,
)
from megtool.pages.page import (
    MAX_BOXES,
    MAX_TABLE_ROWS,
    Page,
    PageColumn,
    PageFigure,
    PageFinding,
    PageSection,
    PageTable,
    PageTile,
)
from megtool.pages.write import MAX_PLAIN_BYTES, render_page, write_page

pytest.importorskip("plotly")

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
    finding = PageFinding(id="x", tone="error", where=name, message=name, hint="look")
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


class Reader(HTMLParser):
    """The elements of a page, and the text of its scripts by id."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, tuple[str, str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.seen[-1] if self.seen else ("", {})
        if tag == "script" and attributes.get("id"):
            kind = attributes.get("type") or ""
            before = self.scripts.get(str(attributes["id"]), ("", ""))[1]
            self.scripts[str(attributes["id"])] = (kind, before + data)

    def unpack(self, name: str) -> Any:
        kind, text = self.scripts[name]
        if kind == "application/gzip":
            text = gzip.decompress(base64.b64decode(text)).decode()
        return text if name == "library" else json.loads(text)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_figures_follow_the_schema_of_plotly() -> None:
    objects = pytest.importorskip("plotly.graph_objects")
    from megtool.pages.figures import NUM_COLORS

    colors = {f"@{n}": "#123456" for n in range(NUM_COLORS)}
    colors |= {"@back": "#ffffff", "@band": "#aaaaaa", "@sequential": "Blues"}

    def paint(value: Any) -> Any:
        if isinstance(value, str):
            return colors.get(value, value)
        if isinstance(value, list):
            return [paint(v) for v in value]
        return {k: paint(v) for k, v in value.items()} if isinstance(value, dict) else value

    for figure in FIGURES:
        for traces in figure.variants.values():
            objects.Figure(data=paint(list(traces)), layout=paint(dict(figure.layout)))


def test_nothing_is_loaded_from_anywhere() -> None:
    text = render_page(make_page())
    reader = read(text)
    for tag, attributes in reader.seen:
        assert not {"src", "srcset", "action", "data"} & attributes.keys()
        if "href" in attributes:
            assert str(attributes["href"]).startswith("#"), tag
    policy = next(a["content"] for t, a in reader.seen if t == "meta" and "http-equiv" in a)
    assert str(policy).startswith("default-src 'none'")
    assert "plotly.js" in reader.unpack("library")[:200]


def test_hostile_names_stay_text() -> None:
    reader = read(render_page(make_page(HOSTILE)))
    tags = [tag for tag, _ in reader.seen]
    assert "img" not in tags
    assert tags.count("script") == 4
    assert not any(k.startswith("on") for _, attributes in reader.seen for k in attributes)
    assert reader.unpack("report") == {"name": HOSTILE, "value": "nan"}
    labels = reader.unpack("content")["figures"]["b1-1"]["variants"][0][0]["labels"]
    assert not any("<" in label for label in labels)


def test_every_figure_says_in_words_what_it_shows() -> None:
    reader = read(render_page(make_page()))
    plots = [a for _, a in reader.seen if a.get("class") == "plot"]
    assert len(plots) == len(FIGURES)
    for attributes, figure in zip(plots, FIGURES, strict=True):
        assert attributes["role"] == "img"
        assert attributes["tabindex"] == "0"
        assert figure.description in str(attributes["aria-label"])


def test_a_large_report_is_compressed_and_complete() -> None:
    data = {"rows": [f"tensor {n}" for n in range(MAX_PLAIN_BYTES // 8)]}
    page = Page(title="t", command="inspect", data=data)
    text = render_page(page)
    assert read(text).unpack("report") == data
    assert len(text) < 3 << 20


def test_large_figures_and_tables_are_limited() -> None:
    many = [TreeNode(path="m", parent="", label="m", size=10**9)]
    many += [TreeNode(path=f"m.{n}", parent="m", label=str(n), size=n + 1) for n in range(5000)]
    trace = treemap("t", "d", many, unit="bytes").variants[""][0]
    assert len(trace["ids"]) <= MAX_BOXES
    assert "m.4999" in trace["ids"]
    assert set(trace["parents"]) <= {"", *trace["ids"]}
    rows = [(str(n),) for n in range(MAX_TABLE_ROWS + 5)]
    assert len(PageTable(title="t", columns=[PageColumn(name="a")], rows=rows).page_rows) < len(
        rows
    )


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError) as caught:
        render_page(make_page())
    assert package in caught.value.message
    assert caught.value.hint == "pip install 'megtool[report]'"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    write_page(path, make_page())
    write_page(path, make_page("second"))
    assert re.search(r"<h1>second</h1>", path.read_text())
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    with pytest.raises(StorageError):
        write_page(path / "below.html", make_page())
