"""The page of `finetune`: curves, rates, memory, throughput and saves of one run or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.console import format_bytes
from megtool.report.figures import LineSeries, bar_figure, line_figure
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
    text_page,
)
from megtool.storage.files import Files
from megtool.storage.location.path import location
from megtool.train.loss_plot import smooth
from megtool.train.run_log import LOG_FILE, format_duration, read_log

MAX_POINTS = 2000
"""Points of a curve; of longer runs every n-th step is drawn."""

_CURVES = {
    "lr": ("Learning rate", "learning rate", False),
    "grad_norm": ("Gradient norm", "norm", True),
    "loss_scale": ("Loss scale", "scale", True),
    "tokens_per_second": ("Throughput", "tokens per second", False),
    "tflops": ("TFLOP/s of a rank", "TFLOP/s", False),
    "peak_memory_bytes": ("Peak memory", "GiB", False),
    "seconds": ("Seconds of a step", "seconds", False),
    "aux_loss": ("Load-balancing loss", "loss", False),
    "z_loss": ("Router z-loss", "loss", False),
    "num_zeros": ("Zeros in gradients", "elements", False),
}


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The log of a run, by the name that the page gives it."""

    name: str
    lines: Sequence[dict[str, Any]]

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """The iterations and values of a field, thinned out."""
        rows = [
            (line["iteration"], float(line[key]))
            for line in self.lines
            if isinstance(line.get(key), int | float)
        ]
        rows = rows[:: -(-len(rows) // MAX_POINTS) or 1] if rows else []
        return [x for x, _ in rows], [y for _, y in rows]


def finetune_page(report: FinetuneReport | FinetunePlan) -> Page:
    """The page of a run, or of its plan.

    Raises:
        StorageError: a log cannot be read.
    """
    if isinstance(report, FinetunePlan):
        return _plan_page(report)
    runs = [*_read_runs([location(f) for f in (report.destination, *report.against)])]
    outcome = report.outcome
    tiles = [PageTile(label="steps", value=f"{outcome.iteration:,} of {report.train_iters:,}")]
    if report.last_loss is not None:
        tiles.append(PageTile(label="loss", value=f"{report.last_loss:.4f}"))
    if report.evaluations:
        best = min(loss for _, loss in report.evaluations)
        tiles.append(PageTile(label="best evaluation", value=f"{best:.4f}"))
    if outcome.seconds and outcome.tokens:
        tiles.append(
            PageTile(label="tokens per second", value=f"{outcome.tokens / outcome.seconds:,.1f}")
        )
    tiles.append(PageTile(label="peak memory", value=format_bytes(report.peak_bytes)))
    if outcome.skipped:
        tiles.append(PageTile(label="steps skipped", value=f"{outcome.skipped:,}", tone="warning"))
    data = report.to_json() | {"curves": {run.name: list(run.lines) for run in runs}}
    return Page(
        title=report.title(),
        command="finetune",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report, runs)],
        data=data,
    )


def _read_runs(folders: Sequence[Path]) -> Iterator[RunCurves]:
    """The logs of runs, named by the ends of their paths that tell them apart."""
    paths = list(dict.fromkeys(folders))
    depth = 1
    while depth < 32 and len({p.parts[-depth:] for p in paths}) < len(paths):
        depth += 1
    for path in paths:
        name = "/".join(path.parts[-depth:]) or str(path)
        yield RunCurves(name=name, lines=read_log(path / LOG_FILE))


def _sections(report: FinetuneReport, runs: Sequence[RunCurves]) -> Iterator[PageSection]:
    number = f" of {len(runs)} runs" if len(runs) > 1 else ""
    yield PageSection(title=f"Loss{number}", blocks=[_losses(runs)])
    blocks = [
        line_figure(
            title,
            f"{title} over steps.",
            {"": series},
            x="step",
            y=label,
            is_log=is_log,
            is_narrow=True,
        )
        for key, (title, label, is_log) in _CURVES.items()
        if (series := _series(runs, key))
    ]
    if blocks:
        yield PageSection(title="Rates and memory", blocks=blocks)
    yield PageSection(title="Time and saves", blocks=[*_time(report)])


def _series(runs: Sequence[RunCurves], key: str) -> list[LineSeries]:
    series = []
    for run in runs:
        x, y = run.points(key)
        if x:
            if key == "peak_memory_bytes":
                y = [value / (1 << 30) for value in y]
            series.append(LineSeries(name=run.name, x=x, y=y))
    return series


def _losses(runs: Sequence[RunCurves]) -> PageFigure:
    smoothed, exact = [], []
    for run in runs:
        x, y = run.points("loss")
        exact.append(LineSeries(name=run.name, x=x, y=y))
        smoothed.append(LineSeries(name=run.name, x=x, y=smooth(y)))
    evaluations = []
    for run in runs:
        x, y = run.points("eval_loss")
        if x:
            name = f"{run.name}, evaluation"
            evaluations.append(LineSeries(name=name, x=x, y=y, is_marked=True))
    return line_figure(
        "Loss",
        "The loss in nats per token over steps.",
        {
            "running mean": [*smoothed, *evaluations],
            "every step": [*exact, *evaluations],
        },
        x="step",
        y="nats per token",
    )


def _time(report: FinetuneReport) -> Iterator[PageFigure | PageTable]:
    steps = max(report.outcome.seconds - report.outcome.stall_seconds, 0.0)
    parts = [("steps", steps), ("waiting for saves", report.outcome.stall_seconds)]
    yield bar_figure(
        "Where the time went",
        "",
        [(name, s, format_duration(s) if s >= 1 else f"{s:.2f} s") for name, s in parts],
        x="seconds",
    )
    folder = location(report.destination)
    names = sorted(n for n in Files().names(folder) if n.startswith("iter_"))
    if names:
        yield PageTable(
            title="Saves",
            columns=[PageColumn(name="folder", kind="code"), PageColumn(name="step", kind="count")],
            rows=[(n, int(n.removeprefix("iter_"))) for n in names if n[5:].isdecimal()],
            note="`megtool audit` compares them.",
        )


def _plan_page(report: FinetunePlan) -> Page:
    parts = {
        "weights": report.weight_bytes,
        "gradients": report.gradient_bytes,
        "optimizer": report.optimizer_bytes,
        "teacher": report.teacher_bytes,
        "copies of rounded weights": report.fake_quant_bytes,
    }
    page = text_page(report, "finetune --dry-run")
    bars = [(name, float(n), format_bytes(n)) for name, n in parts.items() if n]
    figure = bar_figure("Memory of a rank, without activations", "", bars)
    section = PageSection(title="Memory", blocks=[figure])
    return Page(
        title=page.title,
        command=page.command,
        facts=page.facts,
        sections=[section, *page.sections],
        data=page.data,
    )
