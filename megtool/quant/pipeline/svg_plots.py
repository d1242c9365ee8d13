"""Scatter, bar and cell plots as inline SVG, each with a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40

COLOURS = 6
"""Classes `c0` to `c5` that the page gives colors to, in light and in dark."""

_MOST_CELLS = 12000
_MOST_TIPS = 1500
_SHADES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSeries:
    """Points of one group: `(x, y, label)`."""

    name: str
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """Maps values to pixels, linearly or (`log`) logarithmically."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def of(
        cls, values: Iterable[float], begin: float, end: float, *, log: bool = False
    ) -> PlotAxis:
        """Over all finite values (with `log` those above zero), with a little room."""
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(finite), max(finite)
        if log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.04 or max(abs(high) * 0.1, 0.5)
        return cls(low - room, high + room, begin, end, log)

    def position(self, value: float) -> float:
        """The pixel of a value; NaN and values outside are at the edge."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        value = min(max(value, self.low), self.high) if not math.isnan(value) else self.low
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within, about so many."""
        if self.log:
            step = max(1, round((self.high - self.low) / count))
            first = math.ceil(self.low)
            return [10.0**e for e in range(first, math.floor(self.high) + 1, step)]
        raw = (self.high - self.low) / count
        size = 10 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def scatter(
    title: str,
    series: Sequence[PlotSeries],
    *,
    x: str,
    y: str,
    log: bool = False,
    log_x: bool = False,
    lines: bool = False,
) -> str:
    """Points, with `lines` between those of a series."""
    points = [p for s in series for p in s.points]
    x_axis = PlotAxis.of((p[0] for p in points), LEFT, WIDTH - RIGHT, log=log_x)
    y_axis = PlotAxis.of((p[1] for p in points), HEIGHT - BOTTOM, TOP, log=log)
    out = _axes(x_axis, y_axis, x, y)
    tips = len(points) <= _MOST_TIPS
    for number, group in enumerate(series):
        color = f"c{number % COLOURS}"
        if lines:
            path = " ".join(
                f"{x_axis.position(a):.1f},{y_axis.position(b):.1f}" for a, b, _ in group.points
            )
            out.append(f'<polyline class="line {color}" points="{path}"/>')
        out.append(f'<g class="{color}">')
        for a, b, tip in group.points:
            attributes = f'cx="{x_axis.position(a):.1f}" cy="{y_axis.position(b):.1f}" r="3"'
            mark = f"<circle {attributes}><title>{escape(tip)}</title></circle>"
            out.append(mark if tips else f"<circle {attributes}/>")
        out.append("</g>")
    return _figure(title, out, HEIGHT, [s.name for s in series])


def bars(title: str, series: Sequence[PlotSeries], *, x: str, y: str) -> str:
    """A distribution as steps, one outline per series."""
    points = [p for s in series for p in s.points]
    x_axis = PlotAxis.of((p[0] for p in points), LEFT, WIDTH - RIGHT)
    y_axis = PlotAxis.of([0.0, *(p[1] for p in points)], HEIGHT - BOTTOM, TOP)
    out = _axes(x_axis, y_axis, x, y)
    for number, values in enumerate(series):
        path = " ".join(
            f"{x_axis.position(a):.1f},{y_axis.position(b):.1f} "
            f"{x_axis.position(a + 1):.1f},{y_axis.position(b):.1f}"
            for a, b, _ in values.points
        )
        name = f"<title>{escape(values.name)}</title>"
        out.append(f'<polyline class="line c{number % COLOURS}" points="{path}">{name}</polyline>')
    return _figure(title, out, HEIGHT, [s.name for s in series])


def cells(title: str, rows: Sequence[tuple[str, Sequence[float]]], *, x: str, short: float) -> str:
    """A row of cells for each name, darker for larger values; those below `short` are outlined.

    Where there are very many, a cell stands for several neighbors and shows the least of them.
    """
    widest = max((len(values) for _, values in rows), default=1)
    step = max(1, math.ceil(len(rows) * widest / _MOST_CELLS))
    most = max((v for _, values in rows for v in values), default=0) or 1
    height = max(3, min(16, 480 // max(len(rows), 1)))
    wide = (WIDTH - LEFT - RIGHT) / max(widest, 1)
    room = f"h{max(wide * step - 0.5, 0.5):.1f}v{height - 0.5}h-{max(wide * step - 0.5, 0.5):.1f}z"
    by_shade: dict[int, list[str]] = {}
    outlined: list[str] = []
    out = []
    for r, (name, values) in enumerate(rows):
        if height > 8:
            attributes = f'x="{LEFT - 6}" y="{TOP + r * height + height - 3}"'
            out.append(f'<text class="tick end" {attributes}>{escape(name[-9:])}</text>')
        for c in range(0, len(values), step):
            value = min(values[c : c + step])
            cell = f"M{LEFT + c * wide:.1f} {TOP + r * height}{room}"
            shade = round(math.log1p(max(value, 0)) / math.log1p(most) * _SHADES)
            by_shade.setdefault(shade, []).append(cell)
            if value < short:
                outlined.append(cell)
    for shade, some in sorted(by_shade.items()):
        opacity = f'fill-opacity="{shade / _SHADES:.2f}"'
        out.append(f'<path class="cell" {opacity} d="{"".join(some)}"/>')
    out.append(f'<path class="short" d="{"".join(outlined)}"/>')
    total = TOP + len(rows) * height + BOTTOM
    out.append(f'<text class="label" x="{WIDTH / 2}" y="{total - 12}">{escape(x)}</text>')
    return _figure(title, out, total, [])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> str:
    """A table whose columns a reader may sort; the first is text, the others are numbers."""
    cols = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table class="sortable"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{cols}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _axes(x_axis: PlotAxis, y_axis: PlotAxis, x: str, y: str) -> list[str]:
    low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = []
    for value in y_axis.ticks():
        y_position = y_axis.position(value)
        out.append(
            f'<line class="grid" x1="{LEFT}" y1="{y_position:.1f}" '
            f'x2="{right}" y2="{y_position:.1f}"/>'
        )
        text = f'x="{LEFT - 6}" y="{y_position + 4:.1f}"'
        out.append(f'<text class="tick end" {text}>{value:g}</text>')
    for value in x_axis.ticks(8):
        text = f'x="{x_axis.position(value):.1f}" y="{low + 16}"'
        out.append(f'<text class="tick middle" {text}>{value:g}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" y1="{low}" x2="{right}" y2="{low}"/>')
    out.append(f'<text class="label" x="{WIDTH / 2}" y="{HEIGHT - 6}">{escape(x)}</text>')
    turn = f'transform="translate(14 {HEIGHT / 2 - 10}) rotate(-90)"'
    out.append(f'<text class="label" {turn}>{escape(y)}</text>')
    return out


def _figure(title: str, marks: Sequence[str], height: float, names: Sequence[str]) -> str:
    title_text = escape(title)
    legend = "".join(
        f'<span class="key c{i % COLOURS}">{escape(name)}</span>'
        for i, name in enumerate(names)
        if name
    )
    return (
        f"<figure><figcaption>{title_text}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{title_text}"><title>{title_text}</title>{"".join(marks)}</svg>'
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + "</figure>"
    )
