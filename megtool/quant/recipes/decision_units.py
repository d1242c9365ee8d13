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

    `formats` are its candidates (besides unquantized) in the recipe's order, without those whose
    groups do not divide its weights. `choice` is the format of the recipe that lists them.
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
    """A key of everything that the effect of a format depends on; not its name in the recipe."""
    f = number_format
    facts = (f.algo, str(f.group_size), f.method or recipe.method, f.block_scales)
    return ":".join(facts).removesuffix(":")


def list_units(
    decisions: Sequence[Decision], recipe: Recipe, *, group_size: int = 0
) -> tuple[DecisionUnit, ...]:
    """List the decision units of all modules whose format is chosen, in model order.

    `group_size` replaces that of formats that support several (0: their own).

    Raises:
        RecipeError: modules that run as one do not have the same candidates; or modules with
            candidates are not matrices of a layer or the head.
    """
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.choices and d.module.kind != "linear":
            raise RecipeError(
                f"{d.module.name} is a {d.module.kind.replace('_', ' ')}, but formats can only be "
                "chosen for matrices",
                hint="add a rule that gives it a format or excludes it",
            )
        if d.module.kind == "linear":
            groups[unit_of(d.module)].append(d)
    out = []
    for name, members in groups.items():
        if not any(d.choices for d in members):
            continue
        conflicting = next((d for d in members if d.format != members[0].format), None)
        if conflicting is not None or members[0].format is None:
            raise RecipeError(
                f"engines run {name} as one, and the recipe gives {members[0].module.name} "
                f"{members[0].label}, {(conflicting or members[0]).module.name} "
                f"{(conflicting or members[0]).label}",
                hint="let one rule decide about all of it",
            )
        listed = [format_of(c, recipe, group_size) for c in members[0].choices if c != KEEP]
        out.append(
            DecisionUnit(
                name=name,
                layer=members[0].module.layer,
                modules=tuple(d.module.name for d in members),
                formats=tuple(f for f in listed if all(_divides(f, d.module) for d in members)),
                choice=members[0].format,
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
            raise RecipeError(f"there is no format {name!r} to choose", hint=suggest(name, FORMATS))
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
