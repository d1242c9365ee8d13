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
from megtool.report.figures import TreeNode, treemap
from megtool.report.html import MAX_PLAIN_BYTES, render_page, write_page
from megtool.report.page import MAX_BOXES, MAX_TABLE_ROWS, Page, PageColumn, PageTable
from tests.support.pages import FIGURES, HOSTILE, make_page

pytest.importorskip("plotly")


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
    from megtool.report.figures import NUM_COLORS

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
