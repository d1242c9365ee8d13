"""The page of `audit`: findings by step, norms and updates over steps and layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from megtool.audit.rules import AUDIT_RULES, RULES_BY_ID
from megtool.audit.run_audit import StepPoint
from megtool.commands.reports.audit import AuditReport
from megtool.console import format_bytes
from megtool.report.figures import HeatGrid, LineSeries, heat_figure, line_figure
from megtool.report.finding import Finding
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
    Tone,
)

MAX_FINDINGS = 300
"""Findings on a page; the JSON has all."""

_MAX_STEPS = 400


def audit_page(report: AuditReport) -> Page:
    """The page of an audit."""
    counts = Counter(f.rule.severity for f in report.findings)
    tiles = [
        PageTile(label="saves", value=f"{len(report.saves):,}"),
        _count_tile("errors", counts["error"], "error"),
        _count_tile("warnings", counts["warning"], "warning"),
        PageTile(label="read", value=format_bytes(report.read_bytes)),
    ]
    if report.saves:
        tiles.insert(
            1, PageTile(label="steps", value=f"{report.saves[0].step} to {report.saves[-1].step}")
        )
    return Page(
        title=report.title(),
        command="audit",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report)],
        data=report.to_json(),
    )


def _count_tile(label: str, count: int, tone: Tone) -> PageTile:
    return PageTile(label=label, value=f"{count:,}", tone=tone if count else "good")


def _sections(report: AuditReport) -> Iterator[PageSection]:
    yield PageSection(title="Overview", blocks=[_overview(report)])
    yield PageSection(
        title="Findings",
        findings=[
            Finding(
                id=f.id,
                severity="error" if f.rule.severity == "error" else "warning",
                module=f"step {f.step}" + (f", {f.tensor}" if f.tensor else ""),
                message=f.message + (f" (and {f.others:,} more tensors)" if f.others else ""),
                effect=f.rule.title,
                hint=f.rule.hint,
            )
            for f in report.findings[:MAX_FINDINGS]
        ],
    )
    if report.points:
        yield PageSection(
            title="Norms and updates over steps",
            text="Each line is one kind of weight, over all layers. Updates are estimated from "
            "sketches.",
            blocks=[_over_steps(report.points)],
        )
        if any(p.layer is not None for p in report.points):
            yield PageSection(
                title="Layers over steps",
                text="A row is a layer, a column a save.",
                blocks=[*_over_layers(report.points)],
            )
    yield PageSection(title="Saves", blocks=[*_training(report), _saves(report)])


def _overview(report: AuditReport) -> PageFigure:
    """A grid of rules and steps: where something was found."""
    steps = [s.step for s in report.saves]
    steps = sorted({*steps, *(f.step for f in report.findings)})
    known = Counter((f.id, f.step) for f in report.findings)
    totals = Counter(f.id for f in report.findings)
    rules = [r.id for r in AUDIT_RULES if not (report.is_quick and r.needs_data)]
    rules.sort(key=lambda r: -totals[r])
    return heat_figure(
        "What was found at which step",
        f"{len(report.findings):,} findings of {len(totals)} rules at "
        f"{len({f.step for f in report.findings})} of {len(steps)} steps.",
        {
            "": HeatGrid(
                rows=rules,
                columns=[str(s) for s in steps],
                values=[[float(known[r, s]) for s in steps] for r in rules],
                texts=[
                    [f"{RULES_BY_ID[r].title}\nstep {s}: {known[r, s]} findings" for s in steps]
                    for r in rules
                ],
                low=0.0,
                high=max([1.0, *(float(n) for n in known.values())]),
                unit="findings",
                scale="@alarm",
            )
        },
        x="step",
        y="rule",
    )


Measure = Callable[[StepPoint], float | None]
_MEASURES: tuple[tuple[str, Measure, bool], ...] = (
    ("norm", lambda p: p.norm, True),
    ("update since the save before", lambda p: p.update, True),
    (
        "update relative to the norm",
        lambda p: p.update / p.norm if p.update is not None and p.norm else None,
        False,
    ),
    ("exp_avg, root mean square", lambda p: p.moment, False),
    ("exp_avg_sq, root mean square", lambda p: p.variance, False),
)


def _over_steps(points: Sequence[StepPoint]) -> PageFigure:
    variants = {}
    for label, measure, is_sum in _MEASURES:
        by_role: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for p in points:
            value = measure(p)
            if value is not None:
                by_role[p.role][p.step].append(value)
        series = [
            LineSeries(
                name=role,
                x=list(by_step),
                y=[_joined(values, is_sum) for values in by_step.values()],
                is_marked=True,
            )
            for role, by_step in by_role.items()
        ]
        if series:
            variants[label] = series
    return line_figure(
        "Weights by kind",
        f"Norms and updates of {len({p.role for p in points})} kinds of weights over steps.",
        variants,
        x="step",
        y="",
        is_log=True,
    )


def _joined(values: Sequence[float], is_sum: bool) -> float | None:
    total = sum(v * v for v in values) ** 0.5
    value = total if is_sum else total / max(len(values), 1) ** 0.5
    return value if value > 0 else None


def _over_layers(points: Sequence[StepPoint]) -> Iterator[PageFigure]:
    layers = sorted({p.layer for p in points if p.layer is not None})
    steps = sorted({p.step for p in points})
    steps = steps[:: -(-len(steps) // _MAX_STEPS)]
    variants = {}
    for label, measure, is_sum in _MEASURES:
        cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        for p in points:
            value = measure(p)
            if p.layer is not None and value is not None:
                cells[p.layer, p.step].append(value)
        if not cells:
            continue
        variants[label] = HeatGrid(
            rows=[str(n) for n in layers],
            columns=[str(s) for s in steps],
            values=[
                [_joined(cells[n, s], is_sum) if (n, s) in cells else None for s in steps]
                for n in layers
            ],
        )
    yield heat_figure(
        "Layers",
        f"{len(layers)} layers over {len(steps)} steps.",
        variants,
        x="step",
        y="layer",
    )


def _training(report: AuditReport) -> Iterator[PageFigure]:
    fields = (
        ("learning rate", "learning_rate"),
        ("optimizer's step", "optimizer_step"),
        ("scheduler's steps", "scheduler_steps"),
        ("consumed samples", "consumed_samples"),
        ("loss scale", "loss_scale"),
    )
    variants = {}
    for label, name in fields:
        rows = [(s.step, v) for s in report.saves if (v := getattr(s.training, name)) is not None]
        if rows:
            variants[label] = [
                LineSeries(
                    name=label,
                    x=[step for step, _ in rows],
                    y=[float(v) for _, v in rows],
                    is_marked=True,
                )
            ]
    if variants:
        yield line_figure(
            "Training state of each save",
            "Learning rate, steps and samples over saves.",
            variants,
            x="step",
            y="",
        )


def _saves(report: AuditReport) -> PageTable:
    counts = Counter(f.step for f in report.findings)
    return PageTable(
        title="Saves",
        columns=[
            PageColumn(name="step", kind="count"),
            PageColumn(name="findings", kind="count"),
            PageColumn(name="format"),
            PageColumn(name="iteration", kind="count"),
            PageColumn(name="learning rate", kind="number"),
            PageColumn(name="read", kind="bytes"),
            PageColumn(name="bytes", kind="bytes"),
            PageColumn(name="folder", kind="code"),
        ],
        rows=[
            (
                s.step,
                counts[s.step],
                s.format or "cannot be opened",
                s.training.iteration,
                s.training.learning_rate,
                s.read_bytes,
                s.total_bytes,
                s.path,
            )
            for s in report.saves
        ],
    )
