"""Lint: whether engines would load an exported folder, by their loaders' own public rules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megtool.console import several
from megtool.errors import FormatError, UsageError
from megtool.lint.context import read_subject
from megtool.lint.registry import RULES
from megtool.lint.rules import LintFinding, View, apply
from megtool.lint.tables import ENGINES
from megtool.quant.recipes.engine_support import Target, read_target
from megtool.quant.verification.stored_folder import open_folder

_SHOWN = 3
"""Findings of a rule that are shown before the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport:
    """What engines would have against a folder.

    `targets` are engines with their versions, `form` is how the folder says it is quantized, and
    `formats` counts its linear modules by what their tensors are ("" is plain; experts that lie
    in one tensor are one). `num_rules` were held against it, those that are not about this form
    left out.
    """

    path: str
    targets: tuple[str, ...]
    tp: int
    form: str
    formats: dict[str, int]
    num_rules: int
    seconds: float
    findings: tuple[LintFinding, ...]

    @property
    def num_errors(self) -> int:
        """What stops an engine, or makes its output wrong."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_status(self) -> int:
        """0, or 7 if there is any error."""
        return 7 if self.num_errors else 0

    def of(self, target: str) -> tuple[LintFinding, ...]:
        """The findings for one engine."""
        return tuple(f for f in self.findings if f.target == target)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"num_errors": self.num_errors, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        kept = self.formats.get("", 0)
        held = [f"{n} {algo}" for algo, n in self.formats.items() if algo]
        held += [f"{kept} kept"] if kept else []
        ranks = f", for {self.tp} tensor-parallel ranks" if self.tp > 1 else ""
        yield f"{self.path} ({self.form or 'not quantized'}): {', '.join(held)}{ranks}"
        for target in self.targets:
            mine = self.of(target)
            errors = sum(f.severity == "error" for f in mine)
            told = f"{several(errors, 'error')}, {several(len(mine) - errors, 'warning')}"
            yield f"  {target:<14}{told if mine else 'nothing against it'}"
            yield from _by_rule(mine)


def _by_rule(findings: Sequence[LintFinding]) -> Iterator[str]:
    counts = Counter((f.rule, f.severity) for f in findings)
    shown: Counter[tuple[str, str]] = Counter()
    for f in findings:
        key = (f.rule, f.severity)
        shown[key] += 1
        if shown[key] > _SHOWN:
            continue
        yield f"    {f.severity:<8}{f.rule}: {f.module}: {f.message}"
        if shown[key] == min(_SHOWN, counts[key]):
            if counts[key] > _SHOWN:
                yield f"            and {counts[key] - _SHOWN} more (--json lists them)"
            yield f"            {f.meaning}"
            yield f"            {f.hint}; see {f.source}"


def _newer(target: Target) -> LintFinding:
    """What is said of a release that no rule was read for."""
    return LintFinding(
        rule="version",
        severity="warning",
        target=target.name,
        module=target.engine,
        message=target.unknown,
        meaning="what it changed is not known here",
        hint="try the folder with the engine itself",
        source=target.newest_source,
    )


def lint(
    path: str | Path,
    *,
    target: str | Sequence[str] = ENGINES,
    tp: int | None = None,
) -> LintReport:
    """Hold an exported Hugging Face folder against what engines demand of one.

    `target` is an engine, or several, each with a version or not (`vllm@0.16.0`); all three unless
    given. `tp` is the number of tensor-parallel ranks it is to run on. Headers, config files and
    small scales are read, weights are not: whether the codes are right is for `verify` to say.

    Raises:
        UsageError: no such engine, or version.
        FormatError: it is no folder of safetensors.
    """
    began = time.monotonic()
    asked = [target] if isinstance(target, str) else list(target)
    targets = [read_target(t) for t in dict.fromkeys(asked)]
    if not targets:
        raise UsageError("no engine is given", hint="known: " + ", ".join(ENGINES))
    if tp is not None and tp < 1:
        raise UsageError(f"{tp} tensor-parallel ranks", hint="1 or more")
    folder_path = Path(path)
    if not folder_path.is_dir():
        raise FormatError("is no folder", file=folder_path, hint="lint reads exported folders")
    findings: dict[LintFinding, None] = {}
    held = set()
    with open_folder(folder_path) as folder:
        subject = read_subject(folder)
        for one in targets:
            view = View(target=one, tp=tp or 1)
            held |= {rule.id for rule in RULES if rule.holds(subject, view)}
            findings |= dict.fromkeys(apply(RULES, subject, view))
            if one.unknown:
                findings[_newer(one)] = None
    formats = Counter(one.algo for one in subject.linear)
    if subject.form == "mxfp4":
        formats["MXFP4"] += len(subject.stacked)
    return LintReport(
        path=str(path),
        targets=tuple(t.name for t in targets),
        tp=tp or 1,
        form=subject.form,
        formats=dict(sorted(formats.items(), reverse=True)),
        num_rules=len(held),
        seconds=time.monotonic() - began,
        findings=tuple(sorted(findings, key=lambda f: f.severity != "error")),
    )
