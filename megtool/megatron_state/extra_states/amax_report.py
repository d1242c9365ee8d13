"""Report of what a reshard does with FP8's delayed scaling state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megtool.number_formats.delayed_scaling import Columns

AmaxMode = Literal["keep", "rebuild", "strip"]
RELEASES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxTarget:
    """What to do with extra states.

    `mode`: `keep` them, `rebuild` those that contradict their weights, or `strip` empty ones that
    Megatron loads without. `release` of Transformer Engine (1 or 2) is the one to write for, None
    for their own, and `columns` its layout of several experts; `history` is the number of steps of
    histories, None for the current number.
    """

    mode: AmaxMode = "keep"
    release: int | None = None
    history: int | None = None
    columns: Columns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxFinding:
    """A finding about the state of one module; `kind` is one word."""

    module: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxReport:
    """What became of a checkpoint's extra states of Transformer Engine.

    `modules` counts states with scales and histories (each expert counts), `stateless` those with
    only a recipe, `empty` the empty ones. `merged` modules have states of up to `ranks` ranks,
    which differed in `differing`. `release` and `history` are those written (the longest).
    `rewritten` states changed in form or numbers, `rebuilt` ones were computed from weights, and
    `stripped` ones are left out.
    """

    mode: AmaxMode
    modules: int
    stateless: int
    empty: int
    merged: int
    ranks: int
    differing: int
    source_release: int | None
    release: int | None
    source_history: int
    history: int
    rewritten: int
    rebuilt: int
    stripped: int
    findings: tuple[AmaxFinding, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        out: dict[str, Any] = {n: getattr(self, n) for n in self.__dataclass_fields__}
        out["findings"] = [
            {"module": f.module, "kind": f.kind, "text": f.text} for f in self.findings
        ]
        return out

    def describe(self) -> Iterator[str]:
        """The lines `amax` of a report's text."""
        steps = f", histories of {_format_change(self.source_history, self.history)} steps"
        release = _format_change(self.source_release, self.release)
        yield (
            f"{self.modules:,} FP8 states of Transformer Engine {release}"
            + (steps if self.modules else "")
            + (f"; {self.stateless:,} of recipes without state" if self.stateless else "")
        )
        if self.ranks > 1:
            summary = f"merged by max over {self.ranks} ranks"
            if self.differing:
                yield f"{summary}, which differ in {self.differing:,}: scales computed again"
            else:
                yield f"{summary}, which agree"
        if self.rebuilt:
            yield f"{self.rebuilt:,} rebuilt from the weights"
        if self.stripped:
            yield f"{self.stripped:,} empty ones are left out"
        kinds: dict[str, list[AmaxFinding]] = {}
        for finding in self.findings:
            kinds.setdefault(finding.kind, []).append(finding)
        for kind, findings in kinds.items():
            more = f", and {len(findings) - 1:,} more" if len(findings) > 1 else ""
            yield f"{kind}: {findings[0].module}: {findings[0].text}{more}"


def _format_change(before: int | None, after: int | None) -> str:
    return f"{after}" if before in (None, after) else f"{before} -> {after}"
