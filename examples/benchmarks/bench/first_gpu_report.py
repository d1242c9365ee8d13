"""The report of `first_gpu.py`: JSON that a later call resumes from, and one page of HTML."""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.first_gpu_plan import Part

Status = Literal["ok", "failed", "out of time", "skipped", "not here"]

_COLORS = {"ok": "#1a7f37", "failed": "#cf222e", "out of time": "#bf8700"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { border: 1px solid #d0d7de; padding: .2rem .6rem; text-align: left; vertical-align: top; }
pre { background: #f6f8fa; overflow-x: auto; padding: .6rem; white-space: pre-wrap; }
"""


@dataclass(slots=True, kw_only=True)
class Row:
    """What became of a step: its figures, the end of its output, and why it did not run."""

    part: str
    step: str
    status: Status
    seconds: float = 0.0
    why: str = ""
    command: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """All rows so far, in a folder that has `report.json` and `report.html` after each."""

    folder: Path
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, machine: dict[str, str]) -> Report:
        """Return the report of the folder, or a new one.

        Raises:
            SystemExit: it is of another machine, other versions or other sizes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "report.json"
        if not file.exists():
            return cls(folder=folder, machine=machine)
        stored = json.loads(file.read_text())
        changed = [k for k in machine if stored["machine"].get(k) != machine[k]]
        if changed:
            was = ", ".join(f"{k} was {stored['machine'].get(k)}" for k in changed)
            raise SystemExit(f"{file} is of another run: {was}. Give another folder with --out.")
        rows = [Row(**row) for row in stored["rows"]]
        return cls(folder=folder, machine=machine, rows=rows)

    def find(self, part: str, step: str) -> Row | None:
        """Return the row of a step."""
        return next((r for r in self.rows if (r.part, r.step) == (part, step)), None)

    def add(self, row: Row) -> None:
        """Add a row, in place of an earlier one of the step."""
        self.rows = [r for r in self.rows if (r.part, r.step) != (row.part, row.step)] + [row]

    def write(self, parts: list[Part]) -> None:
        """Write both files; each is replaced at once."""
        order = [(part.name, step.name) for part in parts for step in part.steps]
        self.rows.sort(key=lambda r: order.index((r.part, r.step)))
        content = {"machine": self.machine, "rows": [asdict(r) for r in self.rows]}
        self._put("report.json", json.dumps(content, indent=1))
        self._put("report.html", self.render(parts))

    def _put(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(text)
        os.replace(temporary, self.folder / name)

    def summary(self) -> str:
        """Return how many steps ended in which way."""
        counts = Counter(r.status for r in self.rows)
        return ", ".join(f"{n} {status}" for status, n in counts.most_common())

    def render(self, parts: list[Part]) -> str:
        """Return the page."""
        machine = "".join(_line("td", k, v) for k, v in self.machine.items())
        body = [f"<p>{html.escape(self.summary())}</p>", f"<table>{machine}</table>"]
        for part in parts:
            body.append(f"<h2>{html.escape(part.name)}</h2><p>{html.escape(part.question)}</p>")
            for step in part.steps:
                row = self.find(part.name, step.name)
                if row is None:
                    body.append(f"<h3>{html.escape(step.name)}: not run yet</h3>")
                else:
                    body.append(_render_row(row))
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>First run on a GPU</title>'
            f"<style>{_STYLE}</style><h1>First run on a GPU</h1>{''.join(body)}</html>\n"
        )


def _render_row(row: Row) -> str:
    color = _COLORS.get(row.status, "#57606a")
    why = f": {html.escape(row.why)}" if row.why else ""
    out = (
        f'<h3>{html.escape(row.step)} <span style="color:{color}">{row.status}</span></h3>'
        f"<p>{row.seconds:.1f} s{why}</p>"
    )
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for figure in row.figures:
        groups.setdefault(tuple(figure), []).append(figure)
    for names, figures in groups.items():
        lines = "".join(_line("td", *(_text(f[n]) for n in names)) for f in figures)
        out += f"<table>{_line('th', *names)}{lines}</table>"
    if row.command:
        text = html.escape(f"{row.command}\n\n{row.output}")
        is_open = " open" if row.status in ("failed", "out of time") else ""
        out += f"<details{is_open}><summary>command and output</summary><pre>{text}</pre></details>"
    return out


def _line(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(c)}</{tag}>' for c in cells)}</tr>"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
