"""Findings: what is wrong, or odd, with a quantized model, and what engines make of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found in a quantized folder.

    `check` names what was looked at, in one word that does not change; `module` is a canonical
    name, the name of a stored tensor where there is none, or that of a file. `text` says what was
    found, `meaning` what an engine makes of it.
    """

    severity: Severity
    check: str
    module: str
    text: str
    meaning: str

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return asdict(self)


def error(check: str, module: str, text: str, meaning: str) -> Finding:
    """A finding that nothing should be shipped with."""
    return Finding(severity="error", check=check, module=module, text=text, meaning=meaning)


def warning(check: str, module: str, text: str, meaning: str) -> Finding:
    """A finding that someone should look at."""
    return Finding(severity="warning", check=check, module=module, text=text, meaning=meaning)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, each once, otherwise in their order."""
    unique = dict.fromkeys(findings)
    return tuple(sorted(unique, key=lambda f: f.severity != "error"))
