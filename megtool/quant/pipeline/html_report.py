"""The report of `quantize` as one self-contained HTML file, in light and dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from megtool.console import format_bytes
from megtool.quant.calibration.statistics import OCTAVES
from megtool.quant.pipeline.report import CalibrationFacts, QuantizeReport, decibels
from megtool.quant.pipeline.svg_plots import PlotSeries, bars, cells, scatter, table

if TYPE_CHECKING:
    from megtool.quant.verification.verify_folder import FolderVerification, WeightAccuracy

_MOST_ROWS = 2000
"""Modules of a table: those with the least signal, where there are more."""

_EXACT_DB = 120.0

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--weak:#59636e;--line:#d1d9e0;
--panel:#f6f8fa;--bad:#c1121f;--odd:#9a6700;--good:#1a7f37;--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;
--c3:#8250df;--c4:#bf3989;--c5:#57606a}
@media (prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--weak:#9198a1;
--line:#3d444d;--panel:#151b23;--bad:#ff7b72;--odd:#e3b341;--good:#56d364;--c0:#58a6ff;
--c1:#f0883e;--c2:#56d364;--c3:#bc8cff;--c4:#f778ba;--c5:#9198a1}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:2rem auto;
max-width:60rem;padding:0 1rem}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;
margin-top:2.2rem}figure{margin:1rem 0}figcaption,caption{color:var(--weak);text-align:left;
padding-bottom:.3rem}svg{width:100%;height:auto;background:var(--panel);border-radius:6px}
.wide{overflow-x:auto;max-height:30rem;overflow-y:auto}table{border-collapse:collapse;width:100%;
font-variant-numeric:tabular-nums}th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);
text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}
th{position:sticky;top:0;background:var(--back)}dl{display:grid;
grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}dt{color:var(--weak)}
dd{margin:0;overflow-wrap:anywhere}.error{color:var(--bad)}.warning{color:var(--odd)}
.good{color:var(--good)}li{overflow-wrap:anywhere;margin:.3rem 0}
.tick{fill:var(--weak);font-size:11px}.end{text-anchor:end}.middle{text-anchor:middle}
.label{fill:var(--weak);font-size:12px;text-anchor:middle}.grid{stroke:var(--line);
stroke-width:.6}.axis{stroke:var(--weak)}.line{fill:none;stroke-width:1.6}
.cell{fill:var(--c0);stroke:var(--line);stroke-width:.4}
.short{fill:none;stroke:var(--bad);stroke-width:1.4}
.legend{color:var(--weak);font-size:13px}.key{margin-right:1.2rem}
.key::before{content:"\\25CF\\00A0"}
""" + "".join(
    f"g.c{i}{{fill:var(--c{i})}}.line.c{i}{{stroke:var(--c{i})}}"
    f".key.c{i}::before{{color:var(--c{i})}}"
    for i in range(6)
)

_SORT = """
for(const t of document.querySelectorAll("table.sortable")){t.querySelectorAll("th").forEach((h,i)=>
{h.style.cursor="pointer";h.addEventListener("click",()=>{const b=t.tBodies[0],d=h.dataset.d=
h.dataset.d==="1"?"-1":"1";const v=r=>{const s=r.cells[i].textContent,n=parseFloat(
s.replace(/,/g,""));return isNaN(n)?s:n};[...b.rows].sort((x,y)=>{const p=v(x),q=v(y);
return d*(typeof p==="number"&&typeof q==="number"?p-q:String(p).localeCompare(String(q)))})
.forEach(r=>b.append(r))})})}
"""


def page(report: QuantizeReport) -> str:
    """Render the file. It loads nothing, and works without its script."""
    title = f"{report.destination} by recipe {report.recipe}"
    body = "\n".join(_sections(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{escape(title)}</h1>\n{body}\n<script>{_SORT}</script></body></html>\n"
    )


def _sections(report: QuantizeReport) -> Iterator[str]:
    yield _facts(report)
    if report.proof is not None:
        yield _findings(report.proof)
    if report.formats:
        yield "<h2>Formats</h2>" + table(
            ("format", "modules", "weights", "bits", "bytes", "before"),
            [
                (
                    f.format,
                    f"{f.modules:,}",
                    f"{f.weights:,}",
                    f"{8 * f.num_bytes / max(f.weights, 1):.2f}",
                    format_bytes(f.num_bytes),
                    format_bytes(f.source_bytes),
                )
                for f in report.formats
            ],
            caption="Modules by format",
        )
    if report.proof is not None and report.proof.rows:
        yield from _errors(report.proof)
    if report.auto is not None:
        yield _chosen(report)
    if report.calibration is not None:
        yield from _calibrated(report.calibration)
    if report.reproduction:
        yield "<h2>Reproduction</h2>" + _pairs(list(report.reproduction.items()))


def _facts(report: QuantizeReport) -> str:
    notes = [("note", note) for note in report.notes]
    return _pairs([("source", report.source), *report.rows(), *notes])


def _pairs(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(t)}</dd>" for n, t in facts) + "</dl>"


def _findings(proof: FolderVerification) -> str:
    if not proof.findings:
        return '<h2>Findings</h2><p class="good">No findings.</p>'
    items = "".join(
        f'<li><strong class="{f.severity}">{f.severity}</strong> {escape(f.id)}: '
        f"<code>{escape(f.module)}</code>: {escape(f.message)}; {escape(f.effect)}</li>"
        for f in proof.findings[:_MOST_ROWS]
    )
    more = len(proof.findings) - _MOST_ROWS
    footer = f"<p>and {more:,} more (--json lists them)</p>" if more > 0 else ""
    return f"<h2>Findings</h2><ul>{items}</ul>{footer}"


def _errors(proof: FolderVerification) -> Iterator[str]:
    """SQNR and bits by module, in model order."""
    by_label: dict[str, list[tuple[int, WeightAccuracy]]] = defaultdict(list)
    for i, row in enumerate(proof.rows):
        by_label[row.label].append((i, row))
    yield "<h2>Error</h2>"
    yield scatter(
        "Signal over quantization noise of each weight (more is better)",
        [
            PlotSeries(
                name=label,
                points=[
                    (i, min(r.sqnr_db, _EXACT_DB), f"{r.name}: {decibels(r.sqnr_db)}")
                    for i, r in some
                ],
            )
            for label, some in by_label.items()
        ],
        x="module, in model order",
        y="SQNR, dB",
    )
    yield scatter(
        "Bits per weight of each module, scales included",
        [
            PlotSeries(
                name=label,
                points=[(i, r.bits, f"{r.name}: {r.bits:.2f} bits") for i, r in some],
            )
            for label, some in by_label.items()
        ],
        x="module, in model order",
        y="bits",
    )
    shown = proof.worst(_MOST_ROWS)
    yield table(
        ("module", "format", "bits", "bytes", "SQNR", "cosine", "error", "max", "clipped"),
        [
            (
                r.name,
                r.label,
                f"{r.bits:.2f}",
                f"{r.num_bytes:,}",
                decibels(r.sqnr_db),
                f"{r.cosine:.6f}",
                f"{r.relative_error:.3%}",
                f"{r.max_error:.3g}",
                "-" if r.num_clipped is None else f"{r.num_clipped:,}",
            )
            for r in shown
        ],
        caption="All weights, the worst first"
        if len(shown) == len(proof.rows)
        else f"The worst {len(shown):,} of {len(proof.rows):,} weights",
    )


def _chosen(report: QuantizeReport) -> str:
    auto = report.auto
    if auto is None:
        return ""
    curve = [(p.bits, p.loss, f"{p.bits:.3f} bits: {p.loss:.4g}") for p in auto.curve]
    chosen = auto.chosen
    series = [
        PlotSeries(name="least loss at each size", points=curve),
        PlotSeries(
            name="chosen", points=[(chosen.bits, chosen.loss, f"chosen: {chosen.bits:.3f} bits")]
        ),
    ]
    rows = [(f"{p.bits:.3f}", f"{p.loss:.4g}") for p in auto.curve[:_MOST_ROWS]]
    return (
        "<h2>Choice of formats</h2>"
        + scatter(
            "Predicted loss by bits per weight",
            series,
            x="bits per weight",
            y="predicted loss",
            lines=True,
        )
        + "<details><summary>As a table</summary>"
        + table(("bits per weight", "predicted loss"), rows, caption="The curve")
        + "</details>"
    )


def _calibrated(c: CalibrationFacts) -> Iterator[str]:
    if c.inputs or c.histograms or c.coverage:
        yield "<h2>Calibration</h2>"
    if c.inputs:
        kinds = (("amax", "amax"), ("99.99 %", "percent_9999"), ("median", "median"))
        yield scatter(
            "Input magnitudes by activation site: amax, 99.99th percentile and median",
            [
                PlotSeries(
                    name=name,
                    points=[
                        (i, getattr(r, key), f"{r.name}: {getattr(r, key):.4g}")
                        for i, r in enumerate(c.inputs)
                    ],
                )
                for name, key in kinds
            ],
            x="activation site, in model order",
            y="magnitude",
            log=True,
        )
        yield (
            "<details><summary>As a table</summary>"
            + table(
                ("site", "tokens", "median", "99 %", "99.99 %", "amax"),
                [
                    (
                        r.name,
                        f"{r.num_tokens:,}",
                        f"{r.median:.4g}",
                        f"{r.percent_99:.4g}",
                        f"{r.percent_9999:.4g}",
                        f"{r.amax:.4g}",
                    )
                    for r in c.inputs[:_MOST_ROWS]
                ],
                caption="Input magnitudes",
            )
            + "</details>"
        )
    if c.histograms:
        yield _distribution(c)
    if c.coverage:
        yield cells(
            "Tokens per expert (outlined in red: too few)",
            [(row.mixture, row.tokens) for row in c.coverage],
            x="expert",
            short=c.coverage[0].enough,
        )
        yield (
            "<details><summary>As a table</summary>"
            + table(
                ("MoE layer", "experts", "too few", "fewest", "most"),
                [
                    (
                        row.mixture,
                        f"{len(row.tokens):,}",
                        f"{len(row.uncovered):,}",
                        f"{min(row.tokens, default=0):,}",
                        f"{max(row.tokens, default=0):,}",
                    )
                    for row in c.coverage
                ],
                caption="Tokens by expert",
            )
            + "</details>"
        )


def _distribution(c: CalibrationFacts) -> str:
    """Shares of elements by power of two, of the roles with most elements first."""
    used = [i for counts in c.histograms.values() for i, n in enumerate(counts) if n and i]
    low, high = min(used, default=0), max(used, default=0)
    series = []
    for role, counts in list(c.histograms.items())[:12]:
        total = max(sum(counts), 1)
        points = [(float(OCTAVES[0] + i), counts[i] / total, "") for i in range(low, high + 1)]
        series.append(PlotSeries(name=role, points=points))
    return bars(
        "Distribution of input magnitudes, by role",
        series,
        x="power of two",
        y="share of elements",
    )
