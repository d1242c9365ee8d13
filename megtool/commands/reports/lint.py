"""The report of `lint`: what engines find wrong, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megtool.console import several
from megtool.report.finding import Finding, Severity
from megtool.report.sections import Report, Row, Section

_MAX_SHOWN = 3
"""Findings of one rule that are shown; further ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport(Report):
    """What the loaders of engines find wrong with a folder.

    `targets` are engines with their versions, `form` is the `quant_method` of the folder, and
    `formats` counts its linear modules by the format of their tensors ("" is plain; experts in one
    tensor count as one). `num_rules` applied to this form.
    """

    path: str
    targets: tuple[str, ...]
    tp: int
    form: str
    formats: dict[str, int]
    num_rules: int
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def num_errors(self) -> int:
        """Findings that stop an engine, or make its output wrong."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0, or 7 if there is any error."""
        return 7 if self.num_errors else 0

    def of(self, target: str) -> tuple[Finding, ...]:
        """The findings for one engine."""
        return tuple(f for f in self.findings if f.target == target)

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks({"num_errors": self.num_errors, **asdict(self)})

    def title(self) -> str:
        plain = self.formats.get("", 0)
        counts = [f"{n} {algo}" for algo, n in self.formats.items() if algo]
        counts += [f"{plain} unquantized"] if plain else []
        ranks = f", for {self.tp} tensor-parallel ranks" if self.tp > 1 else ""
        return f"{self.path} ({self.form or 'not quantized'}): {', '.join(counts)}{ranks}"

    def rows(self) -> Iterator[Row]:
        for target in self.targets:
            findings = self.of(target)
            errors = sum(f.severity == "error" for f in findings)
            text = f"{several(errors, 'error')}, {several(len(findings) - errors, 'warning')}"
            yield target, text if findings else "no findings"

    def sections(self) -> Iterator[Section]:
        for target in self.targets:
            if findings := self.of(target):
                yield Section(title=target, rows=[*_rows_by_rule(findings)])


def _rows_by_rule(findings: Sequence[Finding]) -> Iterator[Row]:
    counts = Counter((f.id, f.severity) for f in findings)
    shown: Counter[tuple[str, Severity | None]] = Counter()
    for f in findings:
        key = (f.id, f.severity)
        shown[key] += 1
        if shown[key] > _MAX_SHOWN:
            continue
        yield str(f.severity), f"{f.id}: {f.module}: {f.message}"
        if shown[key] == min(_MAX_SHOWN, counts[key]):
            if counts[key] > _MAX_SHOWN:
                yield "", f"and {counts[key] - _MAX_SHOWN} more (--json lists them)"
            yield "", f.effect
            yield "", f"{f.hint}; see {f.source}"
