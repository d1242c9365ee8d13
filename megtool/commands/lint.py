"""Check whether engines would load an exported folder, by the public rules of their loaders."""

from __future__ import annotations

import time
from collections import Counter

from megtool.commands.options.export import LintOptions
from megtool.commands.reports.lint import LintReport
from megtool.errors import FormatError
from megtool.lint.context import read_context
from megtool.lint.engines import ENGINES, EngineTarget
from megtool.lint.folder_view import open_folder
from megtool.lint.rules import apply_rules, load_rules
from megtool.quant.recipes.engine_support import EngineVersion, parse_engine
from megtool.report.finding import Finding, sort_findings


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
