"""The report of what became of FP8's delayed scaling state: merged, brought to a form, found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megtool.number_formats.delayed_scaling import Columns

AmaxHow = Literal["keep", "rebuild", "strip"]
HOW: tuple[AmaxHow, ...] = ("keep", "rebuild", "strip")
RELEASES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxWish:
    """What the user asks of extra states.

    `how`: `keep` them, `rebuild` what the weights contradict, or `strip` those that hold nothing
    where Megatron loads without. `release` of Transformer Engine (1 or 2) is that in whose form
    they are written, None for their own, and `columns` how it lays out those of several experts;
    `history` is the number of steps of histories, None for as many as there are.
    """

    how: AmaxHow = "keep"
    release: int | None = None
    history: int | None = None
    columns: Columns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxFinding:
    """Something about the state of one module: `kind` is one word, `text` says what and where."""

    module: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxReport:
    """What became of a checkpoint's extra states of Transformer Engine.

    `modules` have scales and histories (each expert counts), `stateless` a recipe alone, `empty`
    ones nothing. States of `merged` modules come from up to `ranks` ranks each, which differed in
    `differing`. `release` and `history` are those written (the longest). `rewritten` states were
    changed in form or numbers, `rebuilt` ones from weights; `stripped` ones are left out.
    """

    how: AmaxHow
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

    def lines(self) -> Iterator[str]:
        """The report as a person reads it, for the section `amax`."""
        steps = f", histories of {_change(self.source_history, self.history)} steps"
        release = _change(self.source_release, self.release)
        yield (
            f"{self.modules:,} FP8 states of Transformer Engine {release}"
            + (steps if self.modules else "")
            + (f"; {self.stateless:,} of recipes without state" if self.stateless else "")
        )
        if self.ranks > 1:
            said = f"merged by max over {self.ranks} ranks"
            if self.differing:
                yield f"{said}, which differ in {self.differing:,}: scales computed again"
            else:
                yield f"{said}, which agree"
        if self.rebuilt:
            yield f"{self.rebuilt:,} rebuilt from the weights"
        if self.stripped:
            yield f"{self.stripped:,} that hold nothing are left out"
        kinds: dict[str, list[AmaxFinding]] = {}
        for finding in self.findings:
            kinds.setdefault(finding.kind, []).append(finding)
        for kind, found in kinds.items():
            more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
            yield f"{kind}: {found[0].module}: {found[0].text}{more}"


def _change(before: int | None, after: int | None) -> str:
    return f"{after}" if before in (None, after) else f"{before} -> {after}"
