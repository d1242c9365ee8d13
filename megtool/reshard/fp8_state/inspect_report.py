"""The report of `amax inspect`: what each module's scaling says, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megtool.reports import columns, fold_names
from megtool.reshard.fp8_state.checks import Found
from megtool.reshard.megatron.amax_report import AmaxFinding

FAILED = 7
"""The exit status where something is wrong."""

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST = 8
_UNTOLD = ("columns",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxLine:
    """One module, or one expert of it.

    `release` is Transformer Engine's (1 or 2; 0 for ModelOpt's buffers), `steps` the length of its
    histories. `amax`, `scale` and `implied` (the scale that the history asks for) are by what they
    are of: `input`, `weight`, `output`, `grad_output`, `grad_input`, or a quantizer's name; None
    stands for what is not there. `weight` is the amax of the weight itself, None if it was not
    looked at.
    """

    module: str
    expert: int | None
    release: int
    recipe: str
    steps: int
    margin: float
    amax: dict[str, float]
    scale: dict[str, float | None]
    implied: dict[str, float | None]
    weight: float | None
    findings: tuple[Found, ...]

    @property
    def name(self) -> str:
        """The module, and the expert it is of."""
        return self.module if self.expert is None else f"{self.module}.{self.expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxInspection:
    """What a checkpoint's FP8 scaling says.

    `stateless` counts modules whose recipe keeps no state, by recipe; `empty` extra states hold
    nothing, `foreign` ones something that is not Transformer Engine's. `ranks` of a module's states
    were merged into one where files are per rank; `together` is what was found of ranks that do
    not agree, and of experts that share a state. `compared` says that weights were read.
    """

    source: str
    format: str
    lines_of: tuple[AmaxLine, ...]
    stateless: dict[str, int]
    empty: int
    foreign: int
    ranks: int
    differing: int
    compared: bool
    in_full: bool = False
    together: tuple[AmaxFinding, ...] = ()

    @property
    def findings(self) -> list[tuple[AmaxLine, Found]]:
        """All that was found, with the module it was found in."""
        return [(line, f) for line in self.lines_of for f in line.findings]

    @property
    def exit_status(self) -> int:
        """0, or 7 where something is wrong."""
        return FAILED if self.num_wrong else 0

    @property
    def num_wrong(self) -> int:
        """How many things are wrong."""
        return len(self.together) + sum(f.is_wrong for _, f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "source": self.source,
            "format": self.format,
            "modules": [asdict(line) for line in self.lines_of],
            "stateless": self.stateless,
            "empty": self.empty,
            "foreign": self.foreign,
            "ranks": self.ranks,
            "differing": self.differing,
            "compared": self.compared,
            "together": [asdict(f) for f in self.together],
            "wrong": self.num_wrong,
        }

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        yield f"{self.source} ({self.format})"
        states = [line for line in self.lines_of if line.release]
        buffers = len(self.lines_of) - len(states)
        facts: list[tuple[str, str]] = []
        if states:
            releases = sorted({line.release for line in states})
            steps = sorted({line.steps for line in states})
            facts.append(
                (
                    "states",
                    f"{len(states):,} of Transformer Engine {_either(releases)}.x, "
                    f"{', '.join(sorted({s.recipe for s in states}))}, "
                    f"histories of {_either(steps)} steps",
                )
            )
        if buffers:
            facts.append(("buffers", f"of ModelOpt's quantizers in {buffers:,} modules"))
        facts += [("stateless", f"{n:,} of {recipe}") for recipe, n in self.stateless.items()]
        if self.empty:
            facts.append(("empty", f"{self.empty:,} extra states that hold nothing"))
        if self.foreign:
            facts.append(("others", f"{self.foreign:,} extra states that are not its own"))
        if self.ranks > 1:
            facts.append(
                ("ranks", f"merged by max over {self.ranks}, which differ in {self.differing:,}")
            )
        if states or buffers:
            said = "compared with them" if self.compared else "not looked at"
            facts.append(("weights", said))
        yield from (f"  {what:<10}  {text}" for what, text in facts)
        if self.lines_of:
            yield ""
            yield from self._table()
        yield from self._found()

    def _table(self) -> Iterator[str]:
        head = ["module", "steps", "input", "weight", "true", "scale", "implied", "found"]
        rows = [head]
        groups = [[line] for line in self.lines_of] if self.in_full else fold(self.lines_of)
        for some in groups:
            rows.append(
                [
                    fold_names([line.name for line in some])[0][0],
                    _span(line.steps or None for line in some),
                    _span(_of(line, "input") for line in some),
                    _span(_of(line, "weight") for line in some),
                    _span(line.weight for line in some),
                    _span(line.scale.get("weight") for line in some),
                    _span(line.implied.get("weight") for line in some),
                    _kinds(some),
                ]
            )
        yield from columns(rows)

    def _found(self) -> Iterator[str]:
        kinds: dict[str, list[tuple[AmaxLine, Found]]] = {}
        for line, found in self.findings:
            kinds.setdefault(found.kind, []).append((line, found))
        if kinds or self.together:
            yield ""
        for one in self.together:
            yield f"{one.kind}: {one.module}: {one.text}"
        for kind, some in kinds.items():
            shown = some if self.in_full else some[:_MOST]
            for line, found in shown:
                sign = "" if found.is_wrong else " (no fault)"
                yield f"{kind}{sign}: {line.name}: {found.text}"
            if len(some) > len(shown):
                yield f"{kind}: and {len(some) - len(shown):,} more (--modules lists them)"
        if self.num_wrong:
            yield from self._what_now()
        elif self.lines_of:
            yield ""
            yield "nothing is wrong"

    def _what_now(self) -> Iterator[str]:
        """How much is wrong, what `fix` makes of it, and what it leaves."""
        wrong = self.num_wrong
        yield f"{wrong:,} {'thing is' if wrong == 1 else 'things are'} wrong"
        stays = [f.kind for _, f in self.findings if f.is_wrong and not f.is_mended]
        untold = [f.kind for f in self.together if f.kind in _UNTOLD]
        if untold:
            yield "`megtool amax fix` refuses states whose experts cannot be told apart"
            return
        if len(stays) < wrong:
            yield "`megtool amax fix` puts right what follows from weights and histories" + (
                f": {wrong - len(stays):,} of them" if stays else ""
            )
        if stays:
            yield (
                f"{len(stays):,} follow from neither ({', '.join(dict.fromkeys(stays))}), and stay "
                "until FP8 training goes on"
            )


def fold(lines: Iterable[AmaxLine]) -> list[list[AmaxLine]]:
    """Modules that differ in numbers alone, together."""
    groups: dict[tuple[str, ...], list[AmaxLine]] = {}
    for line in lines:
        groups.setdefault(tuple(_NUMBERS.split(line.name)), []).append(line)
    return list(groups.values())


def _of(line: AmaxLine, what: str) -> float | None:
    found = line.amax.get(what)
    return line.amax.get(f"{what}_quantizer") if found is None else found


def _span(values: Iterable[float | int | None]) -> str:
    """The smallest and the largest of some numbers."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    odd = [v for v in known if v != v]
    if odd:
        return "nan"
    low, high = f"{min(known):.4g}", f"{max(known):.4g}"
    return low if low == high else f"{low}..{high}"


def _kinds(some: Sequence[AmaxLine]) -> str:
    found = dict.fromkeys(f.kind for line in some for f in line.findings)
    return ", ".join(found) or "-"


def _either(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
