"""A finding: one thing wrong, or odd, with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong, or odd, with a checkpoint or a quantized folder.

    `id` names what was checked and never changes. `target` is the engine that it is about, with its
    version (empty: every engine). `module` is the name of a module, a stored tensor or a file;
    `message` says what is wrong, `effect` what an engine makes of it, `hint` what to do, and
    `source` is the public text that says so. What a check leaves empty, its rule fills in.
    """

    id: str = ""
    severity: Severity | None = None
    target: str = ""
    module: str
    message: str
    effect: str = ""
    hint: str = ""
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return asdict(self)


def error(id: str, module: str, message: str, effect: str) -> Finding:
    """A finding that nothing should be shipped with."""
    return Finding(severity="error", id=id, module=module, message=message, effect=effect)


def warning(id: str, module: str, message: str, effect: str) -> Finding:
    """A finding that someone should look at."""
    return Finding(severity="warning", id=id, module=module, message=message, effect=effect)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, each finding once, otherwise in their order."""
    unique = dict.fromkeys(findings)
    return tuple(sorted(unique, key=lambda f: f.severity != "error"))
