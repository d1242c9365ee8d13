"""The report of `amax inspect`: each module's FP8 scaling, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megtool.fp8_state.checks import StateFinding
from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.report.sections import Report, Row, Section, Table, fold_names

FAILED = 7
"""The exit status where something is wrong."""

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST = 8
_AMBIGUOUS = ("columns",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxLine:
    """One module, or one expert of it.

    `release` is Transformer Engine's (1 or 2; 0 for ModelOpt's buffers), `steps` the length of its
    histories. `amax`, `scale` and `implied` (the scale that the history implies) are keyed by
    tensor: `input`, `weight`, `output`, `grad_output`, `grad_input`, or a quantizer's name; None
    where there is no value. `weight` is the amax of the weight itself, None if it was not read.
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
    findings: tuple[StateFinding, ...]

    @property
    def name(self) -> str:
        """The module's name, with the expert's number."""
        return self.module if self.expert is None else f"{self.module}.{self.expert}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxInspection(Report):
    """The FP8 scaling state of a checkpoint.

    `stateless` counts modules whose recipe keeps no state, by recipe; `empty` counts empty extra
    states, `foreign` those that are not Transformer Engine's. States of up to `ranks` ranks were
    merged where files are per rank. `joint_findings` are about ranks that disagree, and experts
    that share a state. `compared` tells whether weights were read.
    """

    source: str
    format: str
    modules: tuple[AmaxLine, ...]
    stateless: dict[str, int]
    empty: int
    foreign: int
    ranks: int
    differing: int
    compared: bool
    is_full: bool = False
    joint_findings: tuple[AmaxFinding, ...] = ()

    @property
    def findings(self) -> list[tuple[AmaxLine, StateFinding]]:
        """All findings, each with its module."""
        return [(line, f) for line in self.modules for f in line.findings]

    @property
    def exit_status(self) -> int:
        """0, or 7 if anything is wrong."""
        return FAILED if self.num_wrong else 0

    @property
    def num_wrong(self) -> int:
        """The number of things that are wrong."""
        return len(self.joint_findings) + sum(f.is_wrong for _, f in self.findings)

    def to_json(self) -> dict[str, Any]:
        values = {
            "source": self.source,
            "format": self.format,
            "modules": [asdict(line) for line in self.modules],
            "stateless": self.stateless,
            "empty": self.empty,
            "foreign": self.foreign,
            "ranks": self.ranks,
            "differing": self.differing,
            "compared": self.compared,
            "together": [asdict(f) for f in self.joint_findings],
            "wrong": self.num_wrong,
        }
        return self.add_remarks(values)

    def title(self) -> str:
        return f"{self.source} ({self.format})"

    def rows(self) -> Iterator[Row]:
        states = [line for line in self.modules if line.release]
        buffers = len(self.modules) - len(states)
        if states:
            releases = sorted({line.release for line in states})
            steps = sorted({line.steps for line in states})
            yield (
                "states",
                f"{len(states):,} of Transformer Engine {_join_numbers(releases)}.x, "
                f"{', '.join(sorted({s.recipe for s in states}))}, "
                f"histories of {_join_numbers(steps)} steps",
            )
        if buffers:
            yield "buffers", f"of ModelOpt's quantizers in {buffers:,} modules"
        yield from (("stateless", f"{n:,} of {recipe}") for recipe, n in self.stateless.items())
        if self.empty:
            yield "empty", f"{self.empty:,} empty extra states"
        if self.foreign:
            yield "others", f"{self.foreign:,} extra states of other libraries"
        if self.ranks > 1:
            yield "ranks", f"merged by max over {self.ranks}, which differ in {self.differing:,}"
        if states or buffers:
            yield "weights", "compared" if self.compared else "not read"

    def sections(self) -> Iterator[Section]:
        if self.modules:
            yield Section(table=self._table())
        yield Section(texts=[*self._finding_lines()])
        if self.num_wrong:
            yield Section(texts=[*self._summary_lines()])
        elif self.modules:
            yield Section(texts=["nothing is wrong"])

    def _table(self) -> Table:
        rows = []
        groups = [[line] for line in self.modules] if self.is_full else group_modules(self.modules)
        for some in groups:
            rows.append(
                [
                    fold_names([line.name for line in some])[0][0],
                    _format_range(line.steps or None for line in some),
                    _format_range(_amax_of_tensor(line, "input") for line in some),
                    _format_range(_amax_of_tensor(line, "weight") for line in some),
                    _format_range(line.weight for line in some),
                    _format_range(line.scale.get("weight") for line in some),
                    _format_range(line.implied.get("weight") for line in some),
                    _format_kinds(some),
                ]
            )
        return Table(
            header=["module", "steps", "input", "weight", "true", "scale", "implied", "finding"],
            rows=rows,
        )

    def _finding_lines(self) -> Iterator[str]:
        kinds: dict[str, list[tuple[AmaxLine, StateFinding]]] = {}
        for line, finding in self.findings:
            kinds.setdefault(finding.kind, []).append((line, finding))
        for joint in self.joint_findings:
            yield f"{joint.kind}: {joint.module}: {joint.text}"
        for kind, findings in kinds.items():
            shown = findings if self.is_full else findings[:_MOST]
            for line, finding in shown:
                sign = "" if finding.is_wrong else " (no fault)"
                yield f"{kind}{sign}: {line.name}: {finding.text}"
            if len(findings) > len(shown):
                yield f"{kind}: and {len(findings) - len(shown):,} more (--modules lists them)"

    def _summary_lines(self) -> Iterator[str]:
        """How many things are wrong, how many `fix` rebuilds, and how many it leaves."""
        num_wrong = self.num_wrong
        yield f"{num_wrong:,} {'thing is' if num_wrong == 1 else 'things are'} wrong"
        unfixable = [f.kind for _, f in self.findings if f.is_wrong and not f.is_fixable]
        ambiguous = [f.kind for f in self.joint_findings if f.kind in _AMBIGUOUS]
        if ambiguous:
            yield "`megtool amax fix` refuses states whose experts cannot be told apart"
            return
        if len(unfixable) < num_wrong:
            yield "`megtool amax fix` rebuilds what follows from weights and histories" + (
                f": {num_wrong - len(unfixable):,} of them" if unfixable else ""
            )
        if unfixable:
            yield (
                f"{len(unfixable):,} cannot ({', '.join(dict.fromkeys(unfixable))}): they "
                "stay until FP8 training resumes"
            )


def group_modules(lines: Iterable[AmaxLine]) -> list[list[AmaxLine]]:
    """Group modules whose names differ only in numbers."""
    groups: dict[tuple[str, ...], list[AmaxLine]] = {}
    for line in lines:
        groups.setdefault(tuple(_NUMBERS.split(line.name)), []).append(line)
    return list(groups.values())


def _amax_of_tensor(line: AmaxLine, tensor: str) -> float | None:
    value = line.amax.get(tensor)
    return line.amax.get(f"{tensor}_quantizer") if value is None else value


def _format_range(values: Iterable[float | int | None]) -> str:
    """The smallest and the largest of some numbers as text."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    odd = [v for v in known if v != v]
    if odd:
        return "nan"
    low, high = f"{min(known):.4g}", f"{max(known):.4g}"
    return low if low == high else f"{low}..{high}"


def _format_kinds(some: Sequence[AmaxLine]) -> str:
    kinds = dict.fromkeys(f.kind for line in some for f in line.findings)
    return ", ".join(kinds) or "-"


def _join_numbers(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
