"""The page of `verify`: what differs, how much and where, and the first differing elements."""

from __future__ import annotations

from collections.abc import Iterator

from megtool.commands.pages.layer_grid import layer_grid
from megtool.commands.reports.verify import Difference, VerifyReport
from megtool.console import format_bytes
from megtool.report.figures import heat_figure
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
    Tone,
)

_TONES: dict[str, Tone] = {
    "equal": "good",
    "ok": "good",
    "close": "good",
    "unverified": "warning",
    "different": "error",
}
_EXACT_DB = 120.0
_NO_TENSORS = ("file", "object", "metadata")


def verify_page(report: VerifyReport) -> Page:
    """The page of a comparison."""
    tiles = [
        PageTile(label="verdict", value=report.verdict, tone=_TONES[report.verdict]),
        PageTile(label="tensors", value=f"{report.num_tensors:,}"),
        PageTile(
            label="differences",
            value=f"{len(report.differences):,}",
            tone="error" if report.differences else "good",
        ),
        PageTile(label="bytes", value=format_bytes(report.num_bytes)),
        PageTile(label="seconds", value=f"{report.seconds:.2f}"),
    ]
    return Page(
        title=report.title(),
        command="verify",
        tiles=tiles,
        facts=[*report.rows(), *report.note_rows()],
        sections=[*_sections(report)],
        data=report.to_json(),
    )


def _sections(report: VerifyReport) -> Iterator[PageSection]:
    if any(d.kind not in _NO_TENSORS for d in report.differences):
        yield PageSection(
            title="Where",
            text="A row is a kind of module, a column a layer. Pale cells are equal.",
            blocks=[_where(report)],
        )
    if report.weights:
        yield PageSection(
            title="Quantized weights",
            text="Signal over quantization noise of each weight: more is better.",
            blocks=[_noise(report), _weights(report)],
        )
    if report.differences:
        samples = [d for d in report.differences if d.samples]
        blocks = [_differences(report), *([_elements(samples)] if samples else [])]
        yield PageSection(title="Differences", blocks=blocks)
    else:
        yield PageSection(title="Differences", findings=[])


def _where(report: VerifyReport) -> PageFigure:
    shares: dict[str, float | None] = dict.fromkeys(report.compared, 0.0)
    largest: dict[str, float | None] = dict.fromkeys(report.compared, 0.0)
    texts = {}
    differences = [d for d in report.differences if d.kind not in _NO_TENSORS]
    for d in differences:
        if d.num_elements and d.num_differing is not None:
            shares[d.tensor] = d.num_differing / d.num_elements
            largest[d.tensor] = d.largest_abs
        else:
            shares[d.tensor] = 1.0
            largest.setdefault(d.tensor, None)
        texts[d.tensor] = d.text
    tensors = {d.tensor for d in differences}
    differs: dict[str, float | None] = {n: float(n in tensors) for n in (*shares, *tensors)}
    return heat_figure(
        "Differing elements",
        f"{len(tensors):,} of {len(shares):,} tensors differ.",
        {
            "which differ": layer_grid(differs, texts=texts),
            "share of elements that differ": layer_grid(shares, texts=texts, unit="share"),
            "largest difference": layer_grid(largest, texts=texts, unit="difference"),
        },
        x="layer",
        y="module",
    )


def _noise(report: VerifyReport) -> PageFigure:
    values: dict[str, float | None] = {w.tensor: min(w.sqnr_db, _EXACT_DB) for w in report.weights}
    texts = {w.tensor: f"{w.packing}: {w.sqnr_db:.1f} dB" for w in report.weights}
    worst = report.weights[0]
    return heat_figure(
        "Signal over quantization noise",
        f"{len(values):,} weights; the worst is {worst.tensor} with {worst.sqnr_db:.1f} dB.",
        {"": layer_grid(values, texts=texts, unit="dB", is_worst=False)},
        x="layer",
        y="module",
    )


def _weights(report: VerifyReport) -> PageTable:
    return PageTable(
        title="Weights, the worst first",
        columns=[
            PageColumn(name="weight", kind="code"),
            PageColumn(name="format"),
            PageColumn(name="SQNR, dB", kind="number"),
            PageColumn(name="least, dB", kind="number"),
            PageColumn(name="cosine", kind="number"),
            PageColumn(name="largest error", kind="number"),
        ],
        rows=[
            (w.tensor, w.packing, w.sqnr_db, w.least_db, w.cosine, w.max_error)
            for w in report.weights
        ],
    )


def _differences(report: VerifyReport) -> PageTable:
    return PageTable(
        title="What differs",
        columns=[
            PageColumn(name="tensor or file", kind="code"),
            PageColumn(name="kind"),
            PageColumn(name="elements", kind="count"),
            PageColumn(name="differ", kind="count"),
            PageColumn(name="by at most", kind="number"),
            PageColumn(name="relative to B", kind="number"),
            PageColumn(name="text"),
        ],
        rows=[
            (
                d.tensor,
                d.kind,
                d.num_elements,
                d.num_differing,
                d.largest_abs,
                d.largest_rel,
                d.text,
            )
            for d in report.differences
        ],
    )


def _elements(differences: list[Difference]) -> PageTable:
    return PageTable(
        title="The first differing elements",
        columns=[
            PageColumn(name="tensor", kind="code"),
            PageColumn(name="index"),
            PageColumn(name="A", kind="number"),
            PageColumn(name="B", kind="number"),
            PageColumn(name="difference", kind="number"),
        ],
        rows=[
            (d.tensor, str(list(index)), a, b, abs(a - b))
            for d in differences
            for index, a, b in d.samples
        ],
    )
