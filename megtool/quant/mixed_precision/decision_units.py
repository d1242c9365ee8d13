"""Decision units: modules that an engine runs as one and that take one format together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megtool.errors import RecipeError
from megtool.quant.recipes.formats import FORMATS, RecipeFormat
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import ModuleInfo, find_fused_name, suggest
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionUnit:
    """Modules that get one format: q, k and v; gate and up; all experts of a layer.

    `formats` are those it may get, besides being kept, in the recipe's order; formats whose groups
    do not divide its weights are not among them. `choice` is the format of the recipe that says so.
    """

    name: str
    layer: int | None
    modules: tuple[str, ...]
    formats: tuple[RecipeFormat, ...]
    choice: RecipeFormat


def unit_of(module: ModuleInfo) -> str:
    """The name of a module's decision unit."""
    name = find_fused_name(module)
    if "expert" in module.roles:
        return name.partition(".experts.")[0] + ".experts"
    return name


def key_of(number_format: RecipeFormat, recipe: Recipe) -> str:
    """A format by all that its effect depends on, whatever a recipe calls it."""
    return (
        f"{number_format.algo}:{number_format.group_size}:{number_format.method or recipe.method}"
    )


def list_units(
    decisions: Sequence[Decision], recipe: Recipe, *, group_size: int = 0
) -> tuple[DecisionUnit, ...]:
    """The units of all decisions that are left to a choice, in the model's order.

    `group_size` replaces that of formats that have several to choose from (0: their own).

    Raises:
        RecipeError: modules that run as one are not left to the same choice, or what is to be
            chosen for are no matrices of a layer or the head.
    """
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.choices and d.module.kind != "linear":
            raise RecipeError(
                f"{d.module.name} is a {d.module.kind.replace('_', ' ')}, and formats are chosen "
                "for matrices alone",
                hint="give it a format, or keep it, with a rule of its own",
            )
        if d.module.kind == "linear":
            groups[unit_of(d.module)].append(d)
    out = []
    for name, some in groups.items():
        if not any(d.choices for d in some):
            continue
        conflicting = next((d for d in some if d.format != some[0].format), None)
        if conflicting is not None or some[0].format is None:
            raise RecipeError(
                f"engines run {name} as one, and the recipe gives {some[0].module.name} "
                f"{some[0].label}, {(conflicting or some[0]).module.name} "
                f"{(conflicting or some[0]).label}",
                hint="let one rule decide about all of it",
            )
        listed = [format_of(c, recipe, group_size) for c in some[0].choices if c != KEEP]
        out.append(
            DecisionUnit(
                name=name,
                layer=some[0].module.layer,
                modules=tuple(d.module.name for d in some),
                formats=tuple(f for f in listed if all(_divides(f, d.module) for d in some)),
                choice=some[0].format,
            )
        )
    return tuple(out)


def format_of(name: str, recipe: Recipe, group_size: int = 0) -> RecipeFormat:
    """A format that a choice names: one of the recipe's, or of the engines'.

    Raises:
        RecipeError: there is none.
    """
    number_format = recipe.formats.get(name)
    if number_format is None:
        if name not in FORMATS:
            raise RecipeError(f"unknown format {name!r} to choose", hint=suggest(name, FORMATS))
        group_sizes = FORMATS[name].groups
        number_format = RecipeFormat(
            name=name, algo=name, group_size=group_sizes[0] if group_sizes else 0
        )
    if (
        group_size
        and len(number_format.number.groups) > 1
        and group_size in number_format.number.groups
    ):
        return replace(number_format, group_size=group_size)
    return number_format


def _divides(number_format: RecipeFormat, module: ModuleInfo) -> bool:
    """Groups and blocks go into the weight, and rows are in pairs where they are packed so."""
    rows, columns = module.shape
    number = number_format.number
    if number_format.group_size and columns % number_format.group_size:
        return False
    if number.scaling == "block" and rows % number_format.group_size:
        return False
    return not (number.bits == 4 and number.groups[0] == 128 and rows % 2)
