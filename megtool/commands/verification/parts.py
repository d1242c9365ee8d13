"""The parts of two checkpoints beside their tensors, each with a verdict of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import LogitsCheck, PartCheck, PartName, SettingPair
from megtool.commands.verification.attached_files import compare_files
from megtool.commands.verification.configuration import compare_configurations
from megtool.commands.verification.findings import Findings
from megtool.commands.verification.training_state import compare_training_state
from megtool.console import Progress
from megtool.errors import UsageError
from megtool.source.checkpoint import CheckpointSource

PARTS: tuple[PartName, ...] = ("tensors", "configuration", "training state", "files")

_SHORT: dict[str, PartName] = {
    "config": "configuration",
    "state": "training state",
    "training-state": "training state",
    "training_state": "training state",
}


@dataclass(slots=True)
class PartsReport:
    """The verdicts, the settings of both models, and the comparison of their logits."""

    parts: list[PartCheck] = field(default_factory=list)
    settings: tuple[SettingPair, ...] = ()
    logits: LogitsCheck | None = None


def parse_parts(text: str | None) -> tuple[PartName, ...]:
    """Return the parts that `--parts` names, all without it.

    Raises:
        UsageError: a name is no part.
    """
    if text is None:
        return PARTS
    names = [_SHORT.get(n, n) for word in text.split(",") if (n := word.strip().lower())]
    for name in names:
        if name not in PARTS:
            raise UsageError(
                f"--parts names {name!r}",
                hint="any of tensors, configuration, state, files, separated by commas",
            )
    if not names:
        raise UsageError("--parts names none", hint="tensors, configuration, state, files")
    return tuple(p for p in PARTS if p in names)


def compare_parts(
    options: VerifyOptions,
    sources: Sequence[CheckpointSource],
    names: Collection[PartName],
    findings: Findings,
    *,
    progress: Progress,
) -> PartsReport:
    """Compare the parts of these names, other than the tensors, and the logits if asked for.

    Raises:
        MegtoolError: an object or a file is damaged; a model cannot run.
    """
    a, b = sources
    out = PartsReport()
    if "configuration" in names:
        part, differences, out.settings = compare_configurations(a, b, options)
        wrong = [d for d in findings.differences if d.part == "configuration"]
        out.parts.append(part.with_differences(len(differences) + len(wrong)))
        findings.differences += differences
    for name, compare in (
        ("training state", compare_training_state),
        ("files", compare_files),
    ):
        if name in names:
            part, differences = compare(a, b)
            out.parts.append(part)
            findings.differences += differences
    if options.logits is not None:
        from megtool.commands.verification.logits import compare_logits

        part, out.logits, differences = compare_logits(options, sources, progress=progress)
        out.parts.append(part)
        findings.differences += differences
    return out
