"""The HTML page: nothing from outside, nothing breaks out of it, marks lie where values are."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megtool.quant.pipeline.html_report import page
from megtool.quant.pipeline.report import QuantizeReport
from megtool.quant.pipeline.svg_plots import (
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    PlotAxis,
    PlotSeries,
    scatter,
)
from tests.support.quant.quantize_reports import HOSTILE, report

_VOID = {"meta", "br", "img", "link", "input", "hr"}
_SVG = "{http://www.w3.org/2000/svg}"


class Reader(HTMLParser):
    """Which elements there are, and whether each is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(s) for s in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def test_every_plot_is_well_formed_and_has_a_title_and_a_table() -> None:
    text = page(report())
    reader = read(text)
    figures = svgs(text)
    assert len(figures) == 6
    for one in figures:
        assert one.attrib["role"] == "img"
        assert one[0].tag == f"{_SVG}title"
        assert one[0].text == one.attrib["aria-label"]
        _, _, width, height = map(float, one.attrib["viewBox"].split())
        for mark in one.iter():
            for key, end in (("cx", width), ("cy", height), ("x", width), ("y", height)):
                if key in mark.attrib:
                    assert -20 <= float(mark.attrib[key]) <= end
    tags = [tag for tag, _ in reader.seen]
    assert tags.count("table") == 5  # formats, weights, curve, inputs, experts
    assert tags.count("caption") == 5
    assert "prefers-color-scheme:dark" in text


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(report())
    for _, attrs in read(text).seen:
        assert not {"src", "href", "xlink:href", "action", "data", "srcset"} & attrs.keys()
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_hostile_names_stay_text() -> None:
    text = page(report(name=HOSTILE))
    reader = read(text)
    tags = [tag for tag, _ in reader.seen]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not any(k.startswith("on") for _, attrs in reader.seen for k in attrs)
    assert svgs(text.replace("\x1b", ""))


def test_marks_lie_where_their_values_are() -> None:
    points = [(0.0, 10.0, "a"), (5.0, 20.0, "b"), (10.0, 40.0, "c")]
    svg = svgs(scatter("t", [PlotSeries(name="s", points=points)], x="x", y="y"))[0]
    marks = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in svg.iter(f"{_SVG}circle")]
    (ax, ay), (bx, by), (cx, cy) = marks
    assert bx - ax == pytest.approx(cx - bx, abs=0.2)
    assert (ay - by) * 2 == pytest.approx(by - cy, abs=0.3)
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT for x, y in marks)
    assert [c[0].text for c in svg.iter(f"{_SVG}circle")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "values", [[], [1.0], [0.0, 0.0], [float("nan"), float("inf"), 3.0], [-1e30, 1e30], [1e-40, 1]]
)
@pytest.mark.parametrize("log", [False, True])
def test_scales_take_anything(values: list[float], log: bool) -> None:
    scale = PlotAxis.of(values, 100, 0, log=log)
    for v in values:
        assert 0 <= scale.position(v) <= 100
    assert len(scale.ticks()) < 20


def test_a_page_of_a_thousand_modules_is_below_a_megabyte() -> None:
    text = page(report(1000, experts=256))
    assert len(text.encode()) < 1_000_000
    read(text)


def test_a_report_of_nothing_has_a_page() -> None:
    bare = QuantizeReport(source="a", destination="b", recipe="fp8")
    assert not svgs(page(bare))
    full = report()
    assert full.proof is not None
    clean = page(replace(full, proof=replace(full.proof, findings=())))
    assert "No findings." in clean
