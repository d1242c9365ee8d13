"""Recipe: the recipes there are, and what one of them would make of a checkpoint, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.quant.explain_report import (
    ExplainReport,
    FormatLine,
    ModuleLine,
    RuleLine,
    fold_decisions,
)
from megtool.quant.recipes.dialects import load_recipe, recipe_names, recipe_text
from megtool.quant.recipes.formats import Format
from megtool.quant.recipes.match import Decision, Matched
from megtool.quant.recipes.modules import Modules
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import KEEP
from megtool.quant.resolve import Decided, decide
from megtool.reports import columns

__all__ = [
    "ExplainReport",
    "FormatLine",
    "ListReport",
    "ModuleLine",
    "RuleLine",
    "ShowReport",
    "explain_recipe",
    "explained",
    "list_recipes",
    "show_recipe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReport:
    """The shipped recipes, in the order of their names."""

    recipes: tuple[Recipe, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"recipes": [_summary(r) for r in self.recipes]}

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        rows = [("recipe", "algorithm", "what it does")]
        rows += [(r.name, r.method, r.description) for r in self.recipes]
        yield from columns(rows, left=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowReport:
    """One recipe: megtool's own as it is written, any other as it is understood."""

    recipe: Recipe
    text: str

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        rules = [
            {"rule": r.label, "match": r.condition.words(), "format": r.format, "why": r.why}
            for r in self.recipe.rules
        ]
        return _summary(self.recipe) | {"rules": rules, "text": self.text}

    def lines(self) -> Iterator[str]:
        """The report as a person reads it; one's own can be redirected to a file and edited."""
        if self.recipe.dialect == "megtool":
            yield from self.text.rstrip("\n").splitlines()
            return
        r = self.recipe
        yield f"{r.name} ({r.dialect}, {'first' if r.first_wins else 'last'} match wins)"
        yield f"  algorithm   {r.method}"
        for f in r.formats.values():
            yield f"  format      {f.name}: {_told(f)}"
        yield ""
        rows = [("rule", "format"), *((rule.label, rule.format) for rule in r.rules)]
        yield from (f"  {line}" for line in columns(rows, left=2))
        yield from (f"  note: {note}" for note in r.notes)


def _told(f: Format) -> str:
    return f.label + (f", groups of {f.group_size}" if f.group_size else "")


def _summary(r: Recipe) -> dict[str, Any]:
    formats = {
        f.name: {"quant_algo": f.algo or None, "kv_cache_quant_algo": f.kv_algo or None}
        | {"group_size": f.group_size or None, "choose": list(f.choose), "bits": f.bits or None}
        for f in r.formats.values()
    }
    return {
        "name": r.name,
        "description": r.description,
        "dialect": r.dialect,
        "first_match_wins": r.first_wins,
        "algorithm": dict(r.algorithm),
        "formats": formats,
    }


def list_recipes() -> ListReport:
    """The recipes that are shipped."""
    return ListReport(recipes=tuple(load_recipe(name) for name in recipe_names()))


def show_recipe(recipe: str | Path) -> ShowReport:
    """One recipe, by the name of a shipped one or the path of a file in any dialect.

    Raises:
        RecipeError: there is none, or something is wrong with it.
    """
    return ShowReport(recipe=load_recipe(recipe), text=recipe_text(recipe)[1].decode())


def explain_recipe(
    source: str | Path,
    recipe: str | Path,
    *,
    target: str | None = None,
    group_size: int | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
) -> ExplainReport:
    """What a recipe makes of the checkpoint `source`, module by module, from headers alone.

    `target` is an engine, or `engine@version`, that is to load the result. `group_size` replaces
    that of formats which have several.

    Raises:
        RecipeError: with all that is wrong with the recipe, for this model, and for the engine.
        UsageError: no such engine.
        MegtoolError: the checkpoint cannot be read, or is of no known model.
    """
    return explained(
        decide(
            source,
            recipe,
            target=target,
            group_size=group_size,
            iteration=iteration,
            family=family,
            like=like,
        )
    )


def explained(decided: Decided) -> ExplainReport:
    """What was decided, module by module and rule by rule."""
    opened, engine = decided.opened, decided.target
    return _report(
        decided.recipe,
        decided.modules,
        decided.matched,
        path=str(opened.path),
        format_=opened.catalogue.format,
        family=decided.family,
        target=engine.name if engine else None,
        doubt=decided.doubt,
    )


def _report(
    recipe: Recipe,
    modules: Modules,
    matched: Matched,
    *,
    path: str,
    format_: str,
    family: str | None,
    target: str | None,
    doubt: str,
) -> ExplainReport:
    decisions = matched.decisions
    weights = [d for d in decisions if d.module.kind != "kv_cache"]
    caches = [d for d in decisions if d.module.kind == "kv_cache"]
    by_format: dict[str, list[Decision]] = {}
    for d in weights:
        by_format.setdefault(d.label, []).append(d)
    return ExplainReport(
        path=path,
        format=format_,
        family=family,
        recipe=recipe.name,
        dialect=recipe.dialect,
        first_match_wins=recipe.first_wins,
        algorithm=dict(recipe.algorithm),
        target=target,
        doubt=doubt,
        rules=tuple(
            RuleLine(
                number=i + 1,
                label=f"{rule.label} ({rule.why})" if rule.why else rule.label,
                format=KEEP if rule.format == KEEP else _label(recipe, rule.format),
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
                modules=len(some),
                weights=sum(d.module.numel for d in some),
                num_bytes=sum(d.num_bytes for d in some),
            )
            for label, some in by_format.items()
        ),
        source_bytes=sum(d.module.num_bytes for d in weights) + modules.other_bytes,
        other_bytes=modules.other_bytes,
        kv_bytes=sum(d.num_bytes for d in caches),
        kv_source_bytes=sum(d.module.num_bytes for d in caches),
        is_estimate=any(d.choices for d in weights),
        notes=matched.notes,
    )


def _label(recipe: Recipe, name: str) -> str:
    found = recipe.formats.get(name)
    return found.label if found else name
