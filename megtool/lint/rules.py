"""Rules: what a line of the rule tables is, and what comes of holding it against a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from megtool.lint.context import Subject
from megtool.quant.recipes.engine_support import Target

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An engine at a version, and the tensor-parallel ranks it will run on (1: one alone)."""

    target: Target
    tp: int = 1

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.target.engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a check found: the module, tensor or file, and the fact. What is left empty is as the
    rule says it."""

    module: str
    text: str
    severity: Severity | None = None
    hint: str = ""
    source: str = ""


Check = Callable[[Subject, View], Iterator[Fault]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that loaders demand.

    `sources` are the public texts it is taken from, by engine: it holds for these engines alone.
    `forms` are the `Subject.form`s it is about, all where there are none. `meaning` is what an
    engine makes of a folder that breaks it, `hint` what to do.
    """

    id: str
    severity: Severity = "error"
    forms: tuple[str, ...] = ()
    sources: Mapping[str, str]
    meaning: str
    hint: str
    check: Check = field(repr=False)

    def holds(self, subject: Subject, view: View) -> bool:
        """Whether it is about this folder and engine."""
        return view.engine in self.sources and (not self.forms or subject.form in self.forms)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One fault of a folder, as a person and a machine read it."""

    rule: str
    severity: Severity
    target: str
    module: str
    message: str
    meaning: str
    hint: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def apply(rules: Iterable[Rule], subject: Subject, view: View) -> Iterator[LintFinding]:
    """All that the rules find."""
    for rule in rules:
        if not rule.holds(subject, view):
            continue
        for fault in rule.check(subject, view):
            yield LintFinding(
                rule=rule.id,
                severity=fault.severity or rule.severity,
                target=view.target.name,
                module=fault.module,
                message=fault.text,
                meaning=rule.meaning,
                hint=fault.hint or rule.hint,
                source=fault.source or rule.sources[view.engine],
            )


class Dated(Protocol):
    """A line of a table that holds for an engine from a version on."""

    @property
    def engine(self) -> str:
        """Which engine."""

    @property
    def since(self) -> str:
        """The first version known to."""


Line = TypeVar("Line", bound=Dated)


def lines_for(view: View, table: Iterable[Line]) -> list[Line]:
    """Those lines of a table that hold for the engine at its version."""
    return [x for x in table if x.engine == view.engine and view.target.has(x.since)]
