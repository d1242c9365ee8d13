"""The page of `evaluate`: the score, and with --against how far the other model is, and where."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.commands.reports.evaluate import Divergence, EvaluatePlan, EvaluateReport
from megtool.report.figures import LineSeries, bar_figure, line_figure
from megtool.report.page import (
    Page,
    PageColumn,
    PageSection,
    PageTable,
    PageTile,
    Tone,
    text_page,
)

_CLOSE, _FAR = 0.99, 0.9  # shares of tokens with the same likeliest one


def evaluate_page(report: EvaluateReport | EvaluatePlan) -> Page:
    """The page of a score, or of the plan of a run."""
    if isinstance(report, EvaluatePlan):
        return text_page(report, "evaluate --dry-run")
    tiles = []
    if report.data:
        tiles += [
            PageTile(label="perplexity", value=f"{report.perplexity:.4f}"),
            PageTile(label="accuracy", value=f"{report.accuracy:.2%}"),
            PageTile(label="tokens", value=f"{report.tokens:,}"),
        ]
    if (d := report.against) is not None:
        tone: Tone = "good" if d.agreement >= _CLOSE else "warning"
        tiles += [
            PageTile(
                label="the same likeliest token",
                value=f"{d.agreement:.2%}",
                tone="error" if d.agreement < _FAR else tone,
            ),
            PageTile(label="KL, nats per token", value=f"{d.kl_mean:.3e}"),
        ]
    return Page(
        title=report.title(),
        command="evaluate",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report)],
        data=report.to_json(),
    )


def _sections(report: EvaluateReport) -> Iterator[PageSection]:
    if (d := report.against) is not None:
        yield from _divergence(report, d)
    if report.tasks:
        yield PageSection(
            title="Tasks",
            blocks=[
                PageTable(
                    title="What lm-eval measured",
                    columns=[
                        PageColumn(name="task"),
                        PageColumn(name="metric"),
                        PageColumn(name="value", kind="number"),
                    ],
                    rows=[
                        (task, name, value)
                        for task, values in report.tasks.items()
                        for name, value in values.items()
                    ],
                )
            ],
        )


def _divergence(report: EvaluateReport, d: Divergence) -> Iterator[PageSection]:
    quantiles = [("50 %", d.kl_median), ("90 %", d.kl_90), ("99 %", d.kl_99), ("99.9 %", d.kl_999)]
    quantiles.append(("all", d.kl_max))
    pairs = [("this model", report.perplexity), (d.path, d.perplexity)]
    yield PageSection(
        title="Against the other model",
        text=f"{report.path} against {d.path} ({d.format}), token by token.",
        blocks=[
            bar_figure(
                "Perplexity", "", [(name, p, f"{p:.4f}") for name, p in pairs], x="perplexity"
            ),
            line_figure(
                "KL divergence below which so many tokens are",
                f"The median is {d.kl_median:.3e}, the largest {d.kl_max:.3e} nats.",
                {
                    "": [
                        LineSeries(
                            name="KL",
                            x=[name for name, _ in quantiles],
                            y=[value if value > 0 else None for _, value in quantiles],
                            is_marked=True,
                        )
                    ]
                },
                x="share of tokens",
                y="nats",
                is_log=True,
            ),
        ],
    )
    if d.worst:
        yield PageSection(
            title="Where they differ most",
            blocks=[
                PageTable(
                    title="Tokens",
                    columns=[
                        PageColumn(name="text before it"),
                        PageColumn(name="token"),
                        PageColumn(name="this model"),
                        PageColumn(name="other model"),
                        PageColumn(name="KL", kind="number"),
                        PageColumn(name="text", kind="count"),
                        PageColumn(name="place", kind="count"),
                    ],
                    rows=[
                        (
                            w.before,
                            w.expected,
                            w.predicted,
                            w.reference,
                            w.kl,
                            w.document,
                            w.place,
                        )
                        for w in d.worst
                    ],
                )
            ],
        )
