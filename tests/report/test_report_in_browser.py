"""Pages in a real browser: figures are drawn, hover and filters work, nothing goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.commands.inspection.name_tree import NameFold
from megtool.commands.pages.inspect import MAX_HISTOGRAMS, inspect_page
from megtool.commands.reports.inspect import InspectReport, TensorLine
from megtool.digests.statistics import TensorStatistics
from megtool.dtypes import dtype
from megtool.report.html import write_page
from megtool.report.page import PageTable
from tests.support.browser import Browser
from tests.support.pages import HOSTILE, make_page

pytest.importorskip("plotly")

MAX_BYTES = 5_000_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "page.html"
    write_page(path, make_page())
    return path


def test_all_kinds_of_figures_are_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    drawn = browser.run(
        "return [...document.querySelectorAll('.plot')].map(e=>e.querySelectorAll("
        "'.slice,.point,.scatterlayer .trace,.hm,.sankey-link').length)"
    )
    assert len(drawn) == 5
    assert all(drawn)
    assert browser.logged() == []
    assert browser.requested() == []


def test_hover_says_what_is_under_the_mouse(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.hover("#b1-4 .plotly .draglayer .nsewdrag")
    text = browser.wait(
        "const e=document.querySelector('#b1-4 .hoverlayer'); return e && e.textContent"
    )
    assert "1" in text
    assert browser.run("return document.getElementById('b1-4-said').textContent")


def test_arrow_keys_move_from_mark_to_mark(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run(
        "const e=document.getElementById('b1-3'); e.focus();"
        "e.dispatchEvent(new KeyboardEvent('keydown',{key:'ArrowRight',bubbles:true}))"
    )
    said = browser.wait("return document.getElementById('b1-3-said').textContent")
    assert "s" in said


def test_light_dark_and_print_have_their_own_colors(browser: Browser, page: Path) -> None:
    color = "return getComputedStyle(document.body).backgroundColor"
    fill = "return document.querySelector('#b1-2 .point path').style.fill"
    browser.open(page)
    light = (browser.run(color), browser.run(fill))
    browser.open(page, dark=True)
    dark = (browser.run(color), browser.run(fill))
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert (browser.run(color), browser.run(fill)) == light
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(color) == dark[0]
    browser.run("document.getElementById('theme').click()")
    assert browser.run(color) == light[0]
    assert browser.logged() == []


def test_a_histogram_opens_on_demand(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.spark').click()")
    assert browser.run("return document.getElementById('detail').open")
    assert browser.run("return document.querySelectorAll('#detail-plot .point').length") == 3
    assert browser.logged() == []


def test_the_json_of_the_page_is_that_of_the_command(browser: Browser, page: Path) -> None:
    browser.open(page)
    text = browser.run("return document.getElementById('report').textContent")
    assert json.loads(text) == {"name": "layers.0", "value": "nan"}


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, make_page(HOSTILE))
    browser.open(path)
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.run("return document.querySelector('h1').textContent")
    assert browser.logged() == []


def moe_report(layers: int = 61, experts: int = 256) -> InspectReport:
    """What inspect says of a mixture of experts of 671B parameters with a tensor per expert."""
    names: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (129280, 7168)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        names |= {f"{at}self_attn.{n}_proj.weight": (7168, 1536) for n in "qkvo"}
        for expert in range(experts if layer > 2 else 1):
            for part in ("gate", "up", "down"):
                names[f"{at}mlp.experts.{expert}.{part}_proj.weight"] = (2048, 7168)
    size = {n: 2 * s[0] * s[1] for n, s in names.items()}
    lines = [
        TensorLine(name=n, shape=s, dtype="bfloat16", num_bytes=size[n], num_shards=1)
        for n, s in names.items()
    ]
    modules = {f"model.{n.removesuffix('.weight')}": b for n, b in size.items()}
    fold = NameFold(parts=("model",), shape=(), dtype="bfloat16", count=1, num_bytes=1)
    facts: dict[str, Any] = {"objects": (), "foreign_objects": (), "attachments": ()}
    return InspectReport(
        path="moe", format="hf", family="deepseek_v3", reason=None, iteration=None, layout={},
        num_files=163, num_shards=len(lines), num_replicas=0, num_tensors=len(lines),
        parameters=sum(size.values()) // 2, num_bytes=sum(size.values()),
        file_bytes=sum(size.values()), dtypes={"bfloat16": sum(size.values())}, states=(),
        padding={}, left_out=(), tree=(fold,), tensors=tuple(lines), object_bytes=0, digests=None,
        modules=modules, **facts,
    )  # fmt: skip


def test_the_page_of_a_huge_model_stays_small_and_filters(browser: Browser, tmp_path: Path) -> None:
    report = moe_report()
    assert report.parameters > 600e9
    path = tmp_path / "moe.html"
    write_page(path, inspect_page(report))
    assert path.stat().st_size < MAX_BYTES
    browser.open(path)
    table = "#" + browser.run("return document.querySelector('input[type=search]').dataset.table")
    for words, count in (("layers.60. experts.255. down", 1), ("layers.9. experts.25.", 3)):
        browser.run(
            "const i=document.querySelector('input[type=search]');"
            "i.value=arguments[0]; i.dispatchEvent(new Event('input'))",
            words,
        )
        found = browser.run(f"return document.querySelectorAll('{table} tbody tr').length")
        assert found == count
    assert browser.logged() == []


@pytest.mark.slow
def test_the_page_of_a_huge_model_with_statistics_stays_small(tmp_path: Path) -> None:
    report = moe_report()
    generator = np.random.default_rng(0)
    lines = []
    for line in report.tensors:
        statistics = TensorStatistics()
        values = generator.standard_normal(256) * generator.uniform(0.8, 1.2)
        statistics.add(values.astype("<f4"), dtype("float32"))
        statistics.bins = statistics.bins * 57344 + generator.integers(0, 700, 512) * (
            statistics.bins > 0
        )
        statistics.count = int(statistics.bins.sum())
        lines.append(replace(line, statistics=statistics))
    page = inspect_page(replace(report, tensors=tuple(lines)))
    write_page(tmp_path / "moe.html", page)
    assert (tmp_path / "moe.html").stat().st_size < MAX_BYTES
    (table,) = (b for s in page.sections for b in s.blocks if b.title == "Tensors")
    assert isinstance(table, PageTable)
    drawn = [row[0] for row in table.rows if row[-1] is not None]
    assert len(drawn) == MAX_HISTOGRAMS
    assert "model.layers.60.self_attn.q_proj.weight" in drawn
    assert "histogram" not in page.data["tensors"][0]
