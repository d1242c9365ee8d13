"""The shipped recipes, and what one of them would make of a checkpoint, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megtool.commands.options.quantize import (
    ExplainRecipeOptions,
    ListRecipesOptions,
    ShowRecipeOptions,
)
from megtool.quant.explain import ExplainReport, FormatLine, ModuleLine, RuleLine, explain
from megtool.quant.recipes.dialects import load_recipe, read_recipe_text, recipe_names
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.resolve import resolve_recipe
from megtool.report.sections import Report, Row, Section, Table

__all__ = [
    "ExplainReport",
    "FormatLine",
    "ListReport",
    "ModuleLine",
    "RuleLine",
    "ShowReport",
    "explain_recipe",
    "list_recipes",
    "show_recipe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReport(Report):
    """The shipped recipes, in the order of their names."""

    recipes: tuple[Recipe, ...]

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks({"recipes": [_summary(r) for r in self.recipes]})

    def title(self) -> str:
        return ""

    def sections(self) -> Iterator[Section]:
        rows = [(r.name, r.method, r.description) for r in self.recipes]
        yield Section(
            table=Table(header=("recipe", "algorithm", "what it does"), rows=rows, left=3)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowReport(Report):
    """One recipe: megtool's own as it is written, any other as it is understood."""

    recipe: Recipe
    text: str

    def to_json(self) -> dict[str, Any]:
        rules = [
            {
                "rule": r.label,
                "match": r.condition.describe(),
                "format": r.format,
                "reason": r.reason,
            }
            for r in self.recipe.rules
        ]
        return self.add_remarks(_summary(self.recipe) | {"rules": rules, "text": self.text})

    def title(self) -> str:
        r = self.recipe
        if r.dialect == "megtool":
            return ""
        return f"{r.name} ({r.dialect}, {'first' if r.first_wins else 'last'} match wins)"

    def rows(self) -> Iterator[Row]:
        if self.recipe.dialect != "megtool":
            yield "algorithm", self.recipe.method
            for f in self.recipe.formats.values():
                yield "format", f"{f.name}: {_describe_format(f)}"

    def sections(self) -> Iterator[Section]:
        r = self.recipe
        if r.dialect == "megtool":
            yield Section(texts=self.text.rstrip("\n").splitlines())
            return
        rules = [(rule.label, rule.format) for rule in r.rules]
        yield Section(table=Table(header=("rule", "format"), rows=rules, left=2))
        yield Section(rows=[("note", note) for note in r.notes])


def _describe_format(f: RecipeFormat) -> str:
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
        **({"rotation": r.rotation.to_json()} if r.rotation else {}),
        "formats": formats,
    }


def list_recipes(options: ListRecipesOptions) -> ListReport:
    """List the shipped recipes."""
    return ListReport(recipes=tuple(load_recipe(name) for name in recipe_names()))


def show_recipe(options: ShowRecipeOptions) -> ShowReport:
    """Show one recipe, by the name of a shipped one or the path of a file in any dialect.

    Raises:
        RecipeError: there is none, or something is wrong with it.
    """
    recipe = options.recipe
    return ShowReport(
        recipe=load_recipe(recipe), text=read_recipe_text(recipe)[1].decode(errors="replace")
    )


def explain_recipe(options: ExplainRecipeOptions) -> ExplainReport:
    """Explain what a recipe makes of a checkpoint, module by module, from headers alone.

    `target` is an engine, or `engine@version`, that is to load the result. `group_size` replaces
    that of formats which have several.

    Raises:
        RecipeError: with all that is wrong with the recipe, for this model, and for the engine.
        UsageError: no such engine.
        MegtoolError: the checkpoint cannot be read, or is of no known model.
    """
    return explain(
        resolve_recipe(
            options.source,
            options.recipe.recipe,
            options.reading,
            target=options.recipe.target,
            group_size=options.recipe.group_size,
        )
    )
