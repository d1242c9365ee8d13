"""The page of `quantize`: error and bits by module, findings, sensitivity and calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megtool.commands.pages.layer_grid import layer_grid
from megtool.commands.pages.lint import MAX_FINDINGS
from megtool.console import format_bytes
from megtool.quant.statistics.site_statistics import OCTAVES
from megtool.quantize.report import AutoChoice, CalibrationFacts, QuantizeReport
from megtool.quantize.verification.verify_folder import FolderVerification
from megtool.report.figures import HeatGrid, LineSeries, bar_figure, heat_figure, line_figure
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
    text_page,
)
from megtool.report.sections import Report

_EXACT_DB = 120.0
_MAX_ROLES = 12
_MAX_UNITS = 40


def quantize_page(report: Report) -> Page:
    """The page of a run, or of its plan."""
    if not isinstance(report, QuantizeReport):
        return text_page(report, "quantize --dry-run")
    tiles = []
    if report.num_bytes:
        tiles += [
            PageTile(label="bytes", value=format_bytes(report.num_bytes)),
            PageTile(label="bits per weight", value=f"{report.bits:.2f}"),
        ]
        if report.source_bytes:
            share = report.num_bytes / report.source_bytes
            tiles.append(PageTile(label="of the source", value=f"{share:.1%}"))
    if (proof := report.proof) is not None:
        errors, warnings = proof.num_errors, len(proof.findings) - proof.num_errors
        tiles.append(
            PageTile(label="errors", value=f"{errors:,}", tone="error" if errors else "good")
        )
        tiles.append(
            PageTile(
                label="warnings", value=f"{warnings:,}", tone="warning" if warnings else "good"
            )
        )
    if (e := report.evaluation) is not None:
        change = e.perplexity_after / e.perplexity_before - 1
        tiles.append(PageTile(label="perplexity", value=f"{change:+.2%}"))
    return Page(
        title=report.title(),
        command="quantize",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report)],
        data=report.to_json(),
    )


def _sections(report: QuantizeReport) -> Iterator[PageSection]:
    if (proof := report.proof) is not None:
        yield PageSection(title="Findings", findings=proof.findings[:MAX_FINDINGS])
    if report.formats:
        yield PageSection(title="Formats", blocks=[*_formats(report)])
    if proof is not None and proof.rows:
        yield PageSection(
            title="Error and bits by module",
            text="Signal over quantization noise of each weight (more is better), and its bits "
            "with scales.",
            blocks=[_grids(proof), _over_layers(proof), _weights(proof)],
        )
    if report.auto is not None:
        yield PageSection(title="Choice of formats", blocks=[*_choice(report.auto)])
    if report.calibration is not None:
        blocks = [*_calibration(report.calibration)]
        if blocks:
            yield PageSection(title="Calibration", blocks=blocks)
    if report.seconds:
        seconds = [(name, s, f"{s:.1f} s") for name, s in report.seconds.items()]
        yield PageSection(
            title="Where the time went",
            blocks=[bar_figure("Seconds by stage", "", seconds, x="seconds")],
        )
    if report.reproduction:
        yield PageSection(title="Reproduction", facts=[*report.reproduction.items()])


def _formats(report: QuantizeReport) -> Iterator[PageFigure | PageTable]:
    bars = [(f.format, float(f.num_bytes), format_bytes(f.num_bytes)) for f in report.formats]
    yield bar_figure("Bytes by format", "", bars)
    yield PageTable(
        title="Modules by format",
        columns=[
            PageColumn(name="format"),
            PageColumn(name="modules", kind="count"),
            PageColumn(name="weights", kind="count"),
            PageColumn(name="bits", kind="number"),
            PageColumn(name="bytes", kind="bytes"),
            PageColumn(name="before", kind="bytes"),
        ],
        rows=[
            (
                f.format,
                f.modules,
                f.weights,
                8 * f.num_bytes / max(f.weights, 1),
                f.num_bytes,
                f.source_bytes,
            )
            for f in report.formats
        ],
    )


def _grids(proof: FolderVerification) -> PageFigure:
    sqnr: dict[str, float | None] = {r.name: min(r.sqnr_db, _EXACT_DB) for r in proof.rows}
    bits: dict[str, float | None] = {r.name: r.bits for r in proof.rows}
    clipped = {r.name: None if r.num_clipped is None else float(r.num_clipped) for r in proof.rows}
    texts = {r.name: f"{r.label}: {r.sqnr_db:.1f} dB, {r.bits:.2f} bits" for r in proof.rows}
    variants = {
        "SQNR": layer_grid(sqnr, texts=texts, unit="dB", is_worst=False),
        "bits per weight": layer_grid(bits, texts=texts, unit="bits"),
        "clipped elements": layer_grid(clipped, texts=texts, unit="elements"),
    }
    worst = min(proof.rows, key=lambda r: r.sqnr_db)
    return heat_figure(
        "Weights by layer and module",
        f"{len(proof.rows):,} weights; the worst is {worst.name} with {worst.sqnr_db:.1f} dB.",
        variants,
        x="layer",
        y="module",
    )


def _over_layers(proof: FolderVerification) -> PageFigure:
    groups: dict[str, list[tuple[int, float, float, str]]] = defaultdict(list)
    for number, r in enumerate(proof.rows):
        text = f"{r.name}: {r.sqnr_db:.1f} dB, {r.bits:.2f} bits"
        groups[r.label].append((number, min(r.sqnr_db, _EXACT_DB), r.bits, text))

    def series(column: int) -> list[LineSeries]:
        return [
            LineSeries(
                name=label,
                x=[p[0] for p in points],
                y=[float(p[column]) for p in points],
                texts=[p[3] for p in points],
                is_marked=True,
            )
            for label, points in groups.items()
        ]

    return line_figure(
        "In model order, by format",
        "Signal over noise and bits of every weight in model order.",
        {"SQNR": series(1), "bits per weight": series(2)},
        x="module, in model order",
        y="",
    )


def _weights(proof: FolderVerification) -> PageTable:
    return PageTable(
        title="All weights, the worst first",
        columns=[
            PageColumn(name="module", kind="code"),
            PageColumn(name="format"),
            PageColumn(name="bits", kind="number"),
            PageColumn(name="bytes", kind="bytes"),
            PageColumn(name="SQNR, dB", kind="number"),
            PageColumn(name="cosine", kind="number"),
            PageColumn(name="error", kind="share"),
            PageColumn(name="max", kind="number"),
            PageColumn(name="clipped", kind="count"),
        ],
        rows=[
            (
                r.name,
                r.label,
                r.bits,
                r.num_bytes,
                r.sqnr_db,
                r.cosine,
                r.relative_error,
                r.max_error,
                r.num_clipped,
            )
            for r in proof.worst(len(proof.rows))
        ],
    )


def _choice(auto: AutoChoice) -> Iterator[PageFigure | PageTable]:
    curve = LineSeries(
        name="least loss at each size",
        x=[p.bits for p in auto.curve],
        y=[p.loss for p in auto.curve],
    )
    chosen = LineSeries(name="chosen", x=[auto.chosen.bits], y=[auto.chosen.loss])
    yield line_figure(
        "Predicted loss by bits per weight",
        f"Chosen: {auto.chosen.bits:.3f} bits with a predicted loss of {auto.chosen.loss:.4g}.",
        {"": [curve, chosen]},
        x="bits per weight",
        y="predicted loss",
    )
    if not auto.units:
        return
    formats = list(dict.fromkeys(label for unit in auto.units for label in unit.losses))
    units = auto.units[:_MAX_UNITS]
    yield heat_figure(
        "Sensitivity: loss with one module in a format, the most sensitive first",
        f"The most sensitive of {len(auto.units):,} units is {auto.units[0].name}.",
        {
            "": HeatGrid(
                rows=[u.name for u in units],
                columns=formats,
                values=[[u.losses.get(label) for label in formats] for u in units],
                unit="nats",
            )
        },
        x="format",
        y="module",
    )
    yield PageTable(
        title="Sensitivity of all units",
        columns=[
            PageColumn(name="modules", kind="code"),
            PageColumn(name="chosen"),
            *(PageColumn(name=label, kind="number") for label in formats),
        ],
        rows=[(u.name, u.format, *(u.losses.get(x) for x in formats)) for u in auto.units],
        is_open=False,
    )


def _calibration(c: CalibrationFacts) -> Iterator[PageFigure | PageTable]:
    if c.inputs:
        columns = (("amax", "amax"), ("99.99 %", "percent_9999"), ("median", "median"))
        yield line_figure(
            "Input magnitudes by activation site",
            f"amax, 99.99th percentile and median of {len(c.inputs):,} sites.",
            {
                "": [
                    LineSeries(
                        name=name,
                        x=list(range(len(c.inputs))),
                        y=[v if (v := getattr(r, key)) > 0 else None for r in c.inputs],
                        texts=[f"{r.name}: {getattr(r, key):.4g}" for r in c.inputs],
                    )
                    for name, key in columns
                ]
            },
            x="activation site, in model order",
            y="magnitude",
            is_log=True,
        )
        yield PageTable(
            title="Input magnitudes",
            columns=[
                PageColumn(name="site", kind="code"),
                PageColumn(name="tokens", kind="count"),
                *(PageColumn(name=n, kind="number") for n in ("median", "99 %", "99.99 %", "amax")),
            ],
            rows=[
                (r.name, r.num_tokens, r.median, r.percent_99, r.percent_9999, r.amax)
                for r in c.inputs
            ],
            is_open=False,
        )
    if c.histograms:
        yield _magnitudes(c)
    if c.coverage:
        yield _coverage(c)


def _magnitudes(c: CalibrationFacts) -> PageFigure:
    """Shares of elements by power of two, of the first roles."""
    used = [i for counts in c.histograms.values() for i, n in enumerate(counts) if n and i]
    low, high = min(used, default=0), max(used, default=0)
    series = []
    for role, counts in list(c.histograms.items())[:_MAX_ROLES]:
        total = max(sum(counts), 1)
        x = [OCTAVES[0] + i for i in range(low, high + 1)]
        y: list[float | None] = [counts[i] / total for i in range(low, high + 1)]
        series.append(LineSeries(name=role, x=x, y=y))
    return line_figure(
        "Distribution of input magnitudes, by role",
        "The share of elements by power of two of their magnitude.",
        {"": series},
        x="power of two",
        y="share of elements",
    )


def _coverage(c: CalibrationFacts) -> PageFigure:
    widest = max(len(row.tokens) for row in c.coverage)
    enough = c.coverage[0].enough
    few = sum(len(row.uncovered) for row in c.coverage)
    return heat_figure(
        f"Tokens of each expert; {few:,} have fewer than {enough:,}",
        f"{few:,} experts have too few tokens.",
        {
            "tokens": HeatGrid(
                rows=[row.mixture for row in c.coverage],
                columns=[str(e) for e in range(widest)],
                values=[[float(n) for n in row.tokens] for row in c.coverage],
                unit="tokens",
            ),
            "too few": HeatGrid(
                rows=[row.mixture for row in c.coverage],
                columns=[str(e) for e in range(widest)],
                values=[[float(n < row.enough) for n in row.tokens] for row in c.coverage],
                unit="too few",
            ),
        },
        x="expert",
        y="MoE layer",
    )
