"""Check whether engines would load an exported folder, by the public rules of their loaders."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megtool.commands.options.export import LintOptions
from megtool.console import several
from megtool.errors import FormatError
from megtool.lint.context import read_context
from megtool.lint.engines import ENGINES, EngineTarget
from megtool.lint.finding import Finding, Severity, sort_findings
from megtool.lint.folder_view import open_folder
from megtool.lint.rules import apply_rules, load_rules
from megtool.quant.recipes.engine_support import EngineVersion, parse_engine
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
        """The report as plain data."""
        return self.add_remarks({"num_errors": self.num_errors, **asdict(self)})

    def title(self) -> str:
        """The folder and its formats."""
        plain = self.formats.get("", 0)
        counts = [f"{n} {algo}" for algo, n in self.formats.items() if algo]
        counts += [f"{plain} unquantized"] if plain else []
        ranks = f", for {self.tp} tensor-parallel ranks" if self.tp > 1 else ""
        return f"{self.path} ({self.form or 'not quantized'}): {', '.join(counts)}{ranks}"

    def rows(self) -> Iterator[Row]:
        """The number of findings for each engine."""
        for target in self.targets:
            findings = self.of(target)
            errors = sum(f.severity == "error" for f in findings)
            text = f"{several(errors, 'error')}, {several(len(findings) - errors, 'warning')}"
            yield target, text if findings else "no findings"

    def sections(self) -> Iterator[Section]:
        """The findings for each engine, by rule."""
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


def _newer_release(target: EngineVersion) -> Finding:
    """The finding for a release that no rule was read for."""
    return Finding(
        id="version",
        severity="warning",
        target=target.name,
        module=target.engine,
        message=target.unknown,
        effect="what it changed is not known",
        hint="try the folder with the engine itself",
        source=target.newest_source,
    )


def lint(options: LintOptions) -> LintReport:
    """Check an exported Hugging Face folder against what engines demand.

    `target` are engines, with or without a version (`vllm@0.16.0`); the default is all three. `tp`
    is the number of tensor-parallel ranks it will run on. Headers, config files and small scales
    are read, weights are not: `verify` compares the codes with the source.

    Raises:
        UsageError: no such engine, or version.
        FormatError: it is no folder of safetensors.
    """
    start = time.monotonic()
    path, tp = options.path, options.tp or 1
    targets = [parse_engine(t) for t in dict.fromkeys(options.target or ENGINES)]
    if not path.is_dir():
        is_file = path.exists()
        raise FormatError(
            "this is a file" if is_file else "the path does not exist",
            file=path,
            hint="lint reads exported Hugging Face folders",
            error_id=None if is_file else "source-not-found",
        )
    findings: dict[Finding, None] = {}
    applied = set()
    rules = load_rules()
    with open_folder(path) as folder:
        context = read_context(folder)
        for engine in (EngineTarget(target=t, tp=tp) for t in targets):
            applied |= {rule.id for rule in rules if rule.applies(context, engine)}
            findings |= dict.fromkeys(apply_rules(rules, context, engine))
            if engine.target.unknown:
                findings[_newer_release(engine.target)] = None
    formats = Counter(module.algo for module in context.linears)
    if context.form == "mxfp4":
        formats["MXFP4"] += len(context.stacked)
    return LintReport(
        path=str(path),
        targets=tuple(t.name for t in targets),
        tp=tp,
        form=context.form,
        formats=dict(sorted(formats.items(), reverse=True)),
        num_rules=len(applied),
        seconds=time.monotonic() - start,
        findings=sort_findings(findings),
    )
