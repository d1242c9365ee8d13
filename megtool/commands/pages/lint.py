"""The page of `lint`: findings by engine, with what to do and the source of each rule."""

from __future__ import annotations

from collections import Counter

from megtool.commands.reports.lint import LintReport
from megtool.report.figures import HeatGrid, bar_figure, heat_figure
from megtool.report.page import Page, PageSection, PageTile

MAX_FINDINGS = 500
"""Findings of one engine on a page."""


def lint_page(report: LintReport) -> Page:
    """The page of what engines find wrong with a folder."""
    warnings = len(report.findings) - report.num_errors
    tiles = [
        PageTile(
            label="errors",
            value=f"{report.num_errors:,}",
            tone="error" if report.num_errors else "good",
        ),
        PageTile(label="warnings", value=f"{warnings:,}", tone="warning" if warnings else "good"),
        PageTile(label="rules", value=f"{report.num_rules:,}"),
        PageTile(label="format", value=report.form or "not quantized"),
    ]
    sections = [
        PageSection(
            title=target,
            findings=report.of(target)[:MAX_FINDINGS],
        )
        for target in report.targets
    ]
    formats = [
        (name or "unquantized", float(n), f"{n:,} modules") for name, n in report.formats.items()
    ]
    ids = list(Counter(f.id for f in report.findings))
    overview = [bar_figure("Modules by format", "", formats)] if formats else []
    if ids:
        counts = Counter((f.id, f.target) for f in report.findings)
        grid = HeatGrid(
            rows=ids,
            columns=report.targets,
            values=[[float(counts[i, t]) or None for t in report.targets] for i in ids],
            unit="findings",
        )
        figure = heat_figure(
            "Findings by rule and engine",
            f"{len(report.findings):,} findings of {len(ids):,} rules.",
            {"": grid},
            x="engine",
            y="rule",
        )
        overview.append(figure)
    return Page(
        title=report.title(),
        command="lint",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[PageSection(title="Overview", blocks=overview), *sections],
        data=report.to_json(),
    )
