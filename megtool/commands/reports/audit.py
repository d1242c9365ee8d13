"""The report of `audit`: saves and findings, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megtool.audit.rules import RULES_BY_ID, AuditFinding
from megtool.audit.run_audit import StepPoint
from megtool.audit.save_facts import SaveFacts
from megtool.console import format_bytes, several
from megtool.report.sections import Report, Row, Section

_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Report):
    """What an audit has found.

    `saves` are the saves by step, `findings` what is wrong, in order of steps, `points` norms and
    updates by step, role and layer. `read_bytes` of `total_bytes` were read, in `seconds` without
    the waiting of a watch. `tracked` is the step that the run's tracker names.
    """

    path: str
    is_quick: bool
    saves: tuple[SaveFacts, ...]
    findings: tuple[AuditFinding, ...]
    points: tuple[StepPoint, ...]
    read_bytes: int
    total_bytes: int
    seconds: float
    tracked: int | None = None

    @property
    def exit_status(self) -> int:
        """0, or 7 with findings."""
        return 7 if self.findings else 0

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks(
            {
                "path": self.path,
                "quick": self.is_quick,
                "tracked": self.tracked,
                "findings": [f.to_json() for f in self.findings],
                "saves": [s.to_json() for s in self.saves],
                "points": {
                    "fields": list(StepPoint.__dataclass_fields__),
                    "rows": [p.to_json() for p in self.points],
                },
                "read_bytes": self.read_bytes,
                "total_bytes": self.total_bytes,
                "seconds": self.seconds,
            }
        )

    def title(self) -> str:
        verdict = several(len(self.findings), "finding") if self.findings else "no findings"
        return f"{self.path}: {several(len(self.saves), 'save')}, {verdict}"

    def rows(self) -> Iterator[Row]:
        if self.saves:
            first, last = self.saves[0], self.saves[-1]
            yield "steps", f"{first.step} to {last.step}" if first is not last else f"{first.step}"
            formats = ", ".join(dict.fromkeys(s.format for s in self.saves if s.format))
            yield "format", formats or "unknown"
        rate = format_bytes(self.read_bytes / self.seconds) if self.seconds else "-"
        total, seconds = format_bytes(self.total_bytes), f"in {self.seconds:.2f} s"
        if self.is_quick:
            yield "read", f"headers and checksums of {total} {seconds}"
        else:
            yield "read", f"{format_bytes(self.read_bytes)} of {total} {seconds} ({rate}/s)"
        if self.tracked is not None:
            yield "tracker", f"step {self.tracked}"
        severities = Counter(f.rule.severity for f in self.findings)
        if severities:
            yield "findings", ", ".join(several(n, s) for s, n in severities.items())

    def sections(self) -> Iterator[Section]:
        if not self.findings:
            return
        rows: list[Row] = [
            (f.rule.severity, f"step {f.step}, {f.id}: {f.text()}") for f in self.findings[:_SHOWN]
        ]
        if len(self.findings) > _SHOWN:
            rows.append(("in all", f"{len(self.findings):,} findings (--json lists them)"))
        yield Section(rows=rows)
        kinds = dict.fromkeys(f.id for f in self.findings)
        yield Section(title="What to do", rows=[(kind, RULES_BY_ID[kind].hint) for kind in kinds])
