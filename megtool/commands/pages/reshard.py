"""The page of `reshard`: the plan as a picture, how bytes are moved, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.console import format_bytes
from megtool.plan.flows import FileFlows
from megtool.report.figures import HeatGrid, bar_figure, flow_figure, heat_figure
from megtool.report.page import Page, PageColumn, PageFigure, PageSection, PageTable, PageTile
from megtool.reshard.report import ReshardReport

_OPERATIONS = {
    "kernel": "long runs, which the kernel or the server can copy",
    "strided": "in buffers: short runs, or digested",
    "cast": "cast",
    "decode": "decoded",
    "fill": "filled",
    "reduce": "averaged",
    "merge": "merged with an adapter",
}
_MAX_BANDS = 400


def reshard_page(report: ReshardReport) -> Page:
    """The page of a reshard, or of its plan."""
    plan = report.plan
    tiles = [
        PageTile(label="bytes of tensors", value=format_bytes(report.num_bytes)),
        PageTile(label="tensors", value=f"{report.tensors:,}"),
        PageTile(label="files", value=f"{plan.source_files:,} to {plan.target_files:,}"),
        PageTile(
            label="estimated seconds" if report.dry_run else "seconds",
            value=f"{plan.seconds if report.dry_run else report.seconds:.1f}",
        ),
    ]
    if report.dropped:
        tiles.append(PageTile(label="dropped", value=f"{len(report.dropped):,}", tone="warning"))
    if report.verified is not None:
        tiles.append(PageTile(label="read back", value=f"{report.verified:,} equal", tone="good"))
    return Page(
        title=report.title() + (", plan" if report.dry_run else ""),
        command="reshard --dry-run" if report.dry_run else "reshard",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report)],
        data=report.to_json(),
    )


def _sections(report: ReshardReport) -> Iterator[PageSection]:
    if report.flows is not None and report.flows.flows:
        yield PageSection(
            title="From file to file",
            text="Source files on the left, target files on the right; where ranks write files of "
            "their own, these are ranks. A band is as wide as its bytes.",
            blocks=[*_flows(report.flows)],
        )
    num_bytes = report.plan.num_bytes
    bars = [
        (label, float(n), format_bytes(n))
        for name, label in _OPERATIONS.items()
        if (n := getattr(num_bytes, name))
    ]
    yield PageSection(
        title="How bytes move",
        facts=report.plan.rows(),
        blocks=[bar_figure("Bytes by operation", "", bars)],
    )
    if report.stages:
        seconds = [(name, s, f"{s:.2f} s") for name, s in report.stages.items()]
        rate = format_bytes(report.num_bytes / report.seconds) if report.seconds else "-"
        copied = format_bytes(report.kernel_bytes)
        yield PageSection(
            title="Where the time went",
            facts=[
                ("rate", f"{rate}/s"),
                ("kernel, server", f"{copied} copied without entering the process"),
            ],
            blocks=[bar_figure("Seconds by stage", "", seconds, x="seconds")],
        )
    if report.dropped:
        yield PageSection(
            title="Dropped",
            blocks=[
                PageTable(
                    title="What the target does not have",
                    columns=[
                        PageColumn(name="name", kind="code"),
                        PageColumn(name="reason"),
                        PageColumn(name="bytes", kind="bytes"),
                    ],
                    rows=[(d.name, d.reason, d.num_bytes) for d in report.dropped],
                )
            ],
        )


def _flows(flows: FileFlows) -> Iterator[PageFigure]:
    num_sources = len(flows.sources)
    names = [*flows.sources, *flows.targets]
    bands = sorted(flows.flows, key=lambda f: -f[2])[:_MAX_BANDS]
    total = sum(f[2] for f in flows.flows)
    description = (
        f"{format_bytes(total)} from {num_sources:,} to {len(flows.targets):,} files in "
        f"{len(flows.flows):,} pairs."
    )
    yield flow_figure(
        "Bytes between files",
        description,
        names,
        [(a, num_sources + b, float(n), _text(n, plain)) for a, b, n, plain in bands],
        colors=["@0"] * num_sources + ["@2"] * len(flows.targets),
    )
    values: list[list[float | None]] = [[None] * len(flows.targets) for _ in flows.sources]
    texts = [[""] * len(flows.targets) for _ in flows.sources]
    for a, b, n, plain in flows.flows:
        values[a][b] = n / (1 << 20)
        texts[a][b] = f"{flows.sources[a]} to {flows.targets[b]}\n{_text(n, plain)}"
    yield heat_figure(
        "The same as a grid",
        description,
        {
            "": HeatGrid(
                rows=flows.sources, columns=flows.targets, values=values, texts=texts, unit="MiB"
            )
        },
        x="target",
        y="source",
    )


def _text(num_bytes: int, plain: int) -> str:
    return f"{format_bytes(num_bytes)}, {plain / max(num_bytes, 1):.0%} of it in long runs"
