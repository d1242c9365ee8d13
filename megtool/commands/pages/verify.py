"""The page of `verify`: what differs, how much and where, and the first differing elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
_NO_TENSORS = ("file", "object", "metadata", "state", "logits")
_PART_TONES: dict[str, Tone] = {"equal": "good", "close": "good", "differs": "error"}
_STATE_NAMES = {
    "": "weights",
    "param": "master weights",
    "main": "master weights",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
"""What optimizer states are to a reader, by the prefix of their tensors' names."""


def verify_page(report: VerifyReport) -> Page:
    """The page of a comparison."""
    tiles = [
        PageTile(label="verdict", value=report.verdict, tone=_TONES[report.verdict]),
        *(
            PageTile(label=p.part, value=p.verdict, tone=_PART_TONES.get(p.verdict, "warning"))
            for p in report.parts
        ),
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
    if report.parts:
        yield PageSection(title="Parts", blocks=[_parts(report)])
    if report.compared or any(d.kind not in _NO_TENSORS for d in report.differences):
        yield PageSection(
            title="Tensors by layer",
            text="A row is a kind of module, a column a layer. Pale cells are equal. Optimizer "
            "state has grids of its own.",
            blocks=[*_grids(report)],
        )
    if report.weights:
        yield PageSection(
            title="Quantized weights",
            text="Signal over quantization noise of each weight: more is better.",
            blocks=[_noise(report), _weights(report)],
        )
    if report.settings:
        yield PageSection(title="Settings", blocks=[_settings(report)])
    if report.differences:
        samples = [d for d in report.differences if d.samples]
        blocks = [_differences(report), *([_elements(samples)] if samples else [])]
        yield PageSection(title="Differences", blocks=blocks)
    else:
        yield PageSection(title="Differences", findings=[])


def _parts(report: VerifyReport) -> PageTable:
    return PageTable(
        title="Verdict by part",
        columns=[
            PageColumn(name="part"),
            PageColumn(name="verdict"),
            PageColumn(name="compared", kind="count"),
            PageColumn(name="differ", kind="count"),
            PageColumn(name="not compared"),
        ],
        rows=[
            (
                part.part,
                part.verdict,
                len(part.compared),
                part.num_differences,
                "; ".join(f"{name}: {why}" for name, why in part.not_compared.items()),
            )
            for part in report.parts
        ],
    )


def _settings(report: VerifyReport) -> PageTable:
    """The settings of both models, those that differ first."""
    ordered = sorted(report.settings, key=lambda s: not s.differs)
    return PageTable(
        title="Settings side by side",
        columns=[
            PageColumn(name="setting", kind="code"),
            PageColumn(name="A"),
            PageColumn(name="B"),
            PageColumn(name="differs"),
        ],
        rows=[(s.name, str(s.a), str(s.b), "differs" if s.differs else "") for s in ordered],
    )


def _grids(report: VerifyReport) -> Iterator[PageFigure]:
    """A grid of the weights, one of the master weights, and one of each moment."""
    differences = [d for d in report.differences if d.kind not in _NO_TENSORS]
    names = dict.fromkeys((*report.compared, *(d.tensor for d in differences)))
    by_state: dict[str, list[str]] = {}
    for name in names:
        by_state.setdefault(name.rpartition(":")[0], []).append(name)
    for state, members in by_state.items():
        chosen = {*members}
        yield _where(
            f"Differing elements: {_STATE_NAMES.get(state, state)}",
            members,
            [d for d in differences if d.tensor in chosen],
        )


def _where(title: str, names: Sequence[str], differences: Sequence[Difference]) -> PageFigure:
    shares: dict[str, float | None] = dict.fromkeys(names, 0.0)
    largest: dict[str, float | None] = dict.fromkeys(names, 0.0)
    texts = {}
    for d in differences:
        if d.num_elements and d.num_differing is not None:
            shares[d.tensor] = d.num_differing / d.num_elements
            largest[d.tensor] = d.largest_abs
        else:
            shares[d.tensor], largest[d.tensor] = 1.0, None
        texts[d.tensor] = d.text
    tensors = {d.tensor for d in differences}
    differs: dict[str, float | None] = {n: float(n in tensors) for n in names}
    return heat_figure(
        title,
        f"{len(tensors):,} of {len(names):,} tensors differ.",
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
