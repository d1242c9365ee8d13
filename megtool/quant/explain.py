"""The report of `recipe explain`: the format of each module by rule, and the sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megtool.console import format_bytes
from megtool.quant.recipes.advice import find_advice
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.resolve import ResolvedRecipe
from megtool.report.sections import Report, Row, Section, Table, count, fold_names, shown

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_target(target: str, doubt: str) -> str:
    """Describe whether the target engine can load the result."""
    return f"{target} loads these formats, but {doubt}" if doubt else f"{target} loads it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLine:
    """One rule: how many modules it matches, and which modules it decides."""

    number: int
    label: str
    format: str
    matches: int
    decides: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLine:
    """Modules with the same decision that differ only in layer or expert number.

    `num_bytes` is the total of all of them, `bits` are per weight including scales, `source_bytes`
    is their present size. `rules` are numbered from 1.
    """

    name: str
    kind: str
    roles: tuple[str, ...]
    count: int
    shape: tuple[int, ...]
    format: str
    group_size: int
    bits: float
    num_bytes: int
    source_bytes: int
    rules: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatLine:
    """All weights of one format: modules, elements, and bytes including scales."""

    format: str
    modules: int
    weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainReport(Report):
    """The effect of a recipe on a model.

    `source_bytes` is the present size of all weights, `other_bytes` that of biases and other
    tensors that rules do not cover; `kv_bytes` and `kv_source_bytes` are the size of the KV cache
    of one token (two bytes per element now). `doubt` says why the target may not run the model even
    though it loads the formats. With `is_estimate`, formats are still to be chosen within a budget.
    """

    path: str
    format: str
    family: str | None
    recipe: str
    dialect: str
    first_match_wins: bool
    algorithm: Mapping[str, Any]
    rotation: Mapping[str, Any] | None
    target: str | None
    doubt: str
    rules: tuple[RuleLine, ...]
    modules: tuple[ModuleLine, ...]
    formats: tuple[FormatLine, ...]
    source_bytes: int
    other_bytes: int
    kv_bytes: int
    kv_source_bytes: int
    is_estimate: bool
    rotation_text: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights after quantization, with scales, biases and unquantized modules."""
        return sum(f.num_bytes for f in self.formats) + self.other_bytes

    @property
    def bits(self) -> float:
        """Bits per weight over all modules."""
        weights = sum(f.weights for f in self.formats)
        return 8 * sum(f.num_bytes for f in self.formats) / max(weights, 1)

    def to_json(self) -> dict[str, Any]:
        names = [n for n in self.__dataclass_fields__ if n != "rotation_text"]
        out: dict[str, Any] = {n: getattr(self, n) for n in names}
        for name in ("rules", "modules", "formats"):
            out[name] = [asdict(line) for line in getattr(self, name)]
        out["algorithm"] = dict(self.algorithm)
        return self.add_remarks(out | {"num_bytes": self.num_bytes, "bits": self.bits})

    def title(self) -> str:
        return f"{self.path} ({self.format}) by recipe {self.recipe}"

    def rows(self) -> Iterator[Row]:
        options = [f"{k} {v}" for k, v in self.algorithm.items() if k != "method"]
        yield "family", self.family or "unknown"
        yield "algorithm", ", ".join([str(self.algorithm.get("method", "none")), *options])
        if self.rotation is not None:
            yield "rotation", self.rotation_text
        order = "first" if self.first_match_wins else "last"
        yield "dialect", f"{self.dialect}: the {order} rule that matches decides"
        if self.target:
            yield "target", describe_target(self.target, self.doubt)

    def sections(self) -> Iterator[Section]:
        yield Section(table=self._rules())
        yield Section(table=self._modules())
        yield Section(table=self._formats(), texts=[*self._totals()])

    def _rules(self) -> Table:
        return Table(
            header=("rule", "", "format", "matches", "decides"),
            rows=[
                (str(r.number), r.label, r.format, str(r.matches), str(r.decides))
                for r in self.rules
                if r.matches or self.dialect == "megtool"
            ],
            left=3,
        )

    def _modules(self) -> Table:
        rows = []
        for m in self.modules:
            rules = ", ".join(map(str, m.rules)) or "none"
            cache = m.kind == "kv_cache"
            size = f"{format_bytes(m.num_bytes)}{' per token' if cache else ''}"
            rows.append((m.name, shown(m.shape), m.format, rules, f"{m.bits:.2f}", size))
        header = ("module", "shape", "format", "rule", "bits", "bytes")
        return Table(header=header, rows=rows, left=4)

    def _formats(self) -> Table:
        rows = []
        for f in self.formats:
            bits = f"{8 * f.num_bytes / max(f.weights, 1):.2f}"
            rows.append(
                (f.format, str(f.modules), count(f.weights), bits, format_bytes(f.num_bytes))
            )
        if self.other_bytes:
            rows.append(("biases and other tensors", "", "", "", format_bytes(self.other_bytes)))
        return Table(header=("format", "modules", "weights", "bits", "bytes"), rows=rows)

    def _totals(self) -> Iterator[str]:
        about = "about " if self.is_estimate else ""
        share = self.num_bytes / max(self.source_bytes, 1)
        yield (
            f"total {about}{format_bytes(self.num_bytes)} of {format_bytes(self.source_bytes)} "
            f"({100 * share:.1f} %), {about}{self.bits:.2f} bits per weight"
        )
        if self.kv_bytes != self.kv_source_bytes:
            yield (
                f"KV cache {format_bytes(self.kv_bytes)} per token, "
                f"{format_bytes(self.kv_source_bytes)} in 16 bits"
            )


def fold_decisions(decisions: Iterable[Decision]) -> Iterator[ModuleLine]:
    """Group decisions that differ only in numbers, in order of first appearance."""
    groups: dict[tuple[object, ...], list[Decision]] = {}
    for d in decisions:
        pattern = _NUMBERS.sub("#", d.module.name)
        group = d.format.group_size if d.format else 0
        groups.setdefault((pattern, d.module.shape, d.label, group, d.rules), []).append(d)
    for members in groups.values():
        first = members[0]
        (name, number), *_ = fold_names(d.module.name for d in members)
        total = sum(d.num_bytes for d in members)
        yield ModuleLine(
            name=name,
            kind=first.module.kind,
            roles=tuple(sorted(first.module.roles)),
            count=number,
            shape=first.module.shape,
            format=first.label,
            group_size=first.format.group_size if first.format else 0,
            bits=8 * total / max(sum(d.module.numel for d in members), 1),
            num_bytes=total,
            source_bytes=sum(d.module.num_bytes for d in members),
            rules=tuple(i + 1 for i in first.rules),
            reason=first.reason,
        )


def explain(resolved: ResolvedRecipe) -> ExplainReport:
    """Report what a recipe does to a checkpoint, by module and by rule."""
    recipe, modules, matched = resolved.recipe, resolved.modules, resolved.matched
    source, target = resolved.source, resolved.target
    decisions = matched.decisions
    weights = [d for d in decisions if d.module.kind != "kv_cache"]
    caches = [d for d in decisions if d.module.kind == "kv_cache"]
    by_format: dict[str, list[Decision]] = {}
    for d in weights:
        by_format.setdefault(d.label, []).append(d)
    return ExplainReport(
        path=str(source.path),
        format=source.catalogue.format,
        family=resolved.family,
        recipe=recipe.name,
        dialect=recipe.dialect,
        first_match_wins=recipe.first_wins,
        algorithm=dict(recipe.algorithm),
        rotation=recipe.rotation.to_json() if recipe.rotation else None,
        rotation_text=resolved.rotation,
        target=target.name if target else None,
        doubt=resolved.doubt,
        rules=tuple(
            RuleLine(
                number=i + 1,
                label=f"{rule.label} ({rule.reason})" if rule.reason else rule.label,
                format=_format_label(recipe, rule.format),
                matches=matched.matches[i],
                decides=matched.decides[i],
                modules=tuple(d.module.name for d in decisions if i in d.rules),
            )
            for i, rule in enumerate(recipe.rules)
        ),
        modules=tuple(fold_decisions(decisions)),
        formats=tuple(
            FormatLine(
                format=label,
                modules=len(members),
                weights=sum(d.module.numel for d in members),
                num_bytes=sum(d.num_bytes for d in members),
            )
            for label, members in by_format.items()
        ),
        source_bytes=sum(d.module.num_bytes for d in weights) + modules.other_bytes,
        other_bytes=modules.other_bytes,
        kv_bytes=sum(d.num_bytes for d in caches),
        kv_source_bytes=sum(d.module.num_bytes for d in caches),
        is_estimate=any(d.choices for d in weights),
        notes=(*matched.notes, *find_advice(d.format.algo for d in weights if d.format)),
    )


def _format_label(recipe: Recipe, name: str) -> str:
    format = recipe.formats.get(name)
    return format.label if format else name
