"""Chooses a format for each decision unit so that the loss grows least within a budget of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megtool.console import format_bytes
from megtool.errors import CalibrationError, UsageError
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.mixed_precision.knapsack import (
    FormatOption,
    KnapsackItem,
    KnapsackSelection,
    curve,
    select,
    smallest,
)
from megtool.quant.recipes.decision_units import DecisionUnit, key_of, list_units
from megtool.quant.recipes.engine_models import (
    kv_cache_only_hint,
    permutes_rotary_rows,
    reject_kv_cache_only,
)
from megtool.quant.recipes.engine_support import EngineVersion, list_permitted_sets
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.match import Decision, estimate_bytes
from megtool.quant.recipes.modules import is_rotary
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenFormat:
    """The format chosen for a decision unit, and its candidates: label, bytes, predicted loss."""

    name: str
    modules: tuple[str, ...]
    label: str
    num_bytes: int
    loss: float
    options: tuple[tuple[str, int, float], ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """A point of the curve: the predicted loss at a number of bits per weight."""

    bits: float
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """The formats that were chosen for an automatic recipe.

    `decisions` are those of all modules. `loss` is predicted: the sum of the losses of each unit
    alone, in nats per token; no choice within `budget_bytes` has a predicted loss below `bound`.
    `curve` has the best choices at all sizes. `notes` say which formats were left out, because the
    engine does not support them or groups do not divide a weight.
    """

    decisions: tuple[Decision, ...]
    units: tuple[ChosenFormat, ...]
    method: str
    weights: int
    budget_bytes: int
    num_bytes: int
    loss: float
    bound: float
    curve: tuple[BudgetPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def bits(self) -> float:
        """Bits per weight, scales included, of all decision units."""
        return 8 * self.num_bytes / max(self.weights, 1)

    def to_json(self) -> dict[str, Any]:
        """The choice as plain data, without the decisions."""
        return {
            "method": self.method,
            "weights": self.weights,
            "budget_bytes": self.budget_bytes,
            "num_bytes": self.num_bytes,
            "bits": self.bits,
            "loss": self.loss,
            "bound": self.bound,
            "units": [
                {
                    "name": u.name,
                    "modules": list(u.modules),
                    "format": u.label,
                    "num_bytes": u.num_bytes,
                    "loss": u.loss,
                    "why": u.reason,
                    "options": [
                        {"format": label, "num_bytes": size, "loss": loss}
                        for label, size, loss in u.options
                    ],
                }
                for u in self.units
            ],
            "curve": [
                {"bits": p.bits, "num_bytes": p.num_bytes, "loss": p.loss} for p in self.curve
            ],
            "notes": list(self.notes),
        }


def choose(
    decisions: Sequence[Decision],
    recipe: Recipe,
    sensitivities: Sensitivities,
    *,
    target: EngineVersion | None = None,
    architecture: str = "",
    bits: float = 0.0,
    group_size: int = 0,
) -> FormatChoice:
    """Choose formats for all modules that a recipe leaves open.

    `bits` replaces the recipe's budget (0: its own). With a `target`, only formats that the engine
    supports, also in combination with each other and with those the recipe fixes, are chosen. Some
    engines support fewer formats for an `architecture` (the model's class in config.json). A unit
    may always stay unquantized.

    Raises:
        UsageError: the budget is below the smallest choice, which is named; or so large that no
            weight is quantized, and the engine does not support a quantized KV cache alone.
        CalibrationError: a unit has no sensitivity, or it is NaN or Inf.
        RecipeError: modules that engines run as one do not have the same candidates.
    """
    units = list_units(decisions, recipe, group_size=group_size)
    by_module = {d.module.name: d for d in decisions}
    notes: list[str] = []
    sets: list[frozenset[str]] = [frozenset(f.algo for u in units for f in u.formats)]
    loaded = set(sets[0])
    if target is not None:
        fixed = {d.format.algo for d in decisions if d.format and d.format.algo}
        experts = any("expert" in by_module[m].module.roles for u in units for m in u.modules)
        permutes_rows = permutes_rotary_rows(target, architecture) and any(
            is_rotary(by_module[m].module) for u in units for m in u.modules
        )
        alone = list_permitted_sets(target, (), sets[0], experts=experts, rotary=permutes_rows)
        loaded = {a for algos in alone for a in algos}
        sets = list_permitted_sets(target, fixed, sets[0], experts=experts, rotary=permutes_rows)
    budgets = _budgets(units, by_module, bits)
    selections: list[
        tuple[KnapsackSelection, list[list[tuple[RecipeFormat | None, FormatOption]]]]
    ] = []
    for algos in sets:
        options = [_options(u, by_module, recipe, sensitivities, algos) for u in units]
        if all(smallest(_items(units, options, c)) <= b for c, b in budgets.items()):
            selections.append((_select(units, options, budgets), options))
    if not selections:
        raise _budget_error(units, by_module, recipe, sensitivities, sets, budgets)
    best, options = min(selections, key=lambda f: (f[0].loss, f[0].num_bytes))
    allowed = {o[0].algo for listed in options for o in listed if o[0]}
    if unsupported := sorted({f.algo for u in units for f in u.formats} - allowed):
        algo_list, lacks = (
            " and ".join(unsupported),
            "mix" if loaded.issuperset(unsupported) else "load",
        )
        notes.append(
            f"{algo_list} left out: {target.name if target else 'the engine'} does not {lacks} them"
        )
    chosen_formats, by_name = [], {}
    for unit, listed, pick in zip(units, options, best.picks, strict=True):
        option, reason = listed[pick], _explain_pick(listed, pick)
        chosen_formats.append(
            ChosenFormat(
                name=unit.name,
                modules=unit.modules,
                label=option[1].name,
                num_bytes=option[1].num_bytes,
                loss=option[1].loss,
                options=tuple((o.name, o.num_bytes, o.loss) for _, o in listed),
                reason=reason,
            )
        )
        for m in unit.modules:
            by_name[m] = _apply_choice(by_module[m], recipe, option[0], reason)
        notes += [
            f"{unit.name} cannot be {c}: groups do not divide its weights"
            for c in unit.choice.choose
            if c != KEEP and c not in {f.name for f in unit.formats}
        ]
    weights = sum(by_module[m].module.numel for u in units for m in u.modules)
    decided = tuple(by_name.get(d.module.name, d) for d in decisions)
    if target is not None and (algo_list := reject_kv_cache_only(target.engine, decided)):
        raise UsageError(
            f"no weight would be quantized, but {target.name} {algo_list}",
            hint="fewer --bits; or " + kv_cache_only_hint(target.engine),
        )
    return FormatChoice(
        decisions=decided,
        units=tuple(chosen_formats),
        method=sensitivities.method,
        weights=weights,
        budget_bytes=sum(budgets.values()),
        num_bytes=best.num_bytes,
        loss=best.loss,
        bound=best.bound,
        curve=tuple(
            BudgetPoint(bits=8 * s.num_bytes / max(weights, 1), num_bytes=s.num_bytes, loss=s.loss)
            for s in curve(_items(units, options))
        ),
        notes=tuple(notes),
    )


def _budgets(
    units: Sequence[DecisionUnit], by_module: Mapping[str, Decision], bits: float
) -> dict[str, int]:
    """The bytes for the modules of each choice in the recipe."""
    weights: dict[str, int] = defaultdict(int)
    allowed: dict[str, float] = {}
    for unit in units:
        weights[unit.choice.name] += sum(by_module[m].module.numel for m in unit.modules)
        allowed[unit.choice.name] = bits or unit.choice.bits
    return {name: int(weights[name] * allowed[name] / 8) for name in weights}


def _options(
    unit: DecisionUnit,
    by_module: Mapping[str, Decision],
    recipe: Recipe,
    sensitivities: Sensitivities,
    algos: frozenset[str],
) -> list[tuple[RecipeFormat | None, FormatOption]]:
    """The options of a decision unit: the recipe's formats in order, then unquantized."""
    losses = sensitivities.losses.get(unit.name, {})
    out: list[tuple[RecipeFormat | None, FormatOption]] = []
    for f in (f for f in unit.formats if f.algo in algos):
        if (key := key_of(f, recipe)) not in losses:
            groups = f" in groups of {f.group_size}" if f.group_size else ""
            raise CalibrationError(
                f"there is no sensitivity of {unit.name} in {f.label}{groups}",
                hint="the calibration is for other formats or another --group-size: calibrate "
                "with this recipe and with data",
            )
        size = sum(estimate_bytes(recipe, by_module[m].module, f) for m in unit.modules)
        out.append((f, FormatOption(name=f.label, num_bytes=size, loss=losses[key])))
    unquantized_bytes = sum(by_module[m].module.num_bytes for m in unit.modules)
    return [*out, (None, FormatOption(name=KEEP, num_bytes=unquantized_bytes, loss=0.0))]


def _items(
    units: Sequence[DecisionUnit],
    options: Sequence[Sequence[tuple[RecipeFormat | None, FormatOption]]],
    choice: str = "",
) -> list[KnapsackItem]:
    return [
        KnapsackItem(name=u.name, options=tuple(o for _, o in listed))
        for u, listed in zip(units, options, strict=True)
        if not choice or u.choice.name == choice
    ]


def _select(
    units: Sequence[DecisionUnit],
    options: Sequence[Sequence[tuple[RecipeFormat | None, FormatOption]]],
    budgets: Mapping[str, int],
) -> KnapsackSelection:
    """Select the best options within each budget, as one selection."""
    parts = {c: select(_items(units, options, c), b) for c, b in budgets.items()}
    picks = {c: iter(s.picks) for c, s in parts.items()}
    return KnapsackSelection(
        picks=tuple(next(picks[u.choice.name]) for u in units),
        num_bytes=sum(s.num_bytes for s in parts.values()),
        loss=sum(s.loss for s in parts.values()),
        bound=sum(s.bound for s in parts.values()),
    )


def _budget_error(
    units: Sequence[DecisionUnit],
    by_module: Mapping[str, Decision],
    recipe: Recipe,
    sensitivities: Sensitivities,
    sets: Sequence[frozenset[str]],
    budgets: Mapping[str, int],
) -> UsageError:
    smallest_bytes: dict[str, int] = {}
    weights: dict[str, int] = defaultdict(int)
    for algos in sets:
        options = [_options(u, by_module, recipe, sensitivities, algos) for u in units]
        for c in budgets:
            size = smallest(_items(units, options, c))
            smallest_bytes[c] = min(size, smallest_bytes.get(c, size))
    for u in units:
        weights[u.choice.name] += sum(by_module[m].module.numel for m in u.modules)
    name = next((c for c in budgets if smallest_bytes[c] > budgets[c]), next(iter(budgets)))
    per = 8 / max(weights[name], 1)
    return UsageError(
        f"a budget of {budgets[name] * per:.4g} bits a weight ({format_bytes(budgets[name])}) is "
        f"below the {smallest_bytes[name] * per:.4f} ({smallest_bytes[name]} bytes) of the "
        "smallest choice",
        hint=f"--bits {_rounded_up(smallest_bytes[name] * per)}, or more formats to choose from",
    )


def _rounded_up(bits: float) -> float:
    return -int(-bits * 100 // 1) / 100


def _explain_pick(listed: Sequence[tuple[RecipeFormat | None, FormatOption]], pick: int) -> str:
    """The reason for a choice: loss and savings, or why no format was chosen."""
    picked, unquantized = listed[pick], listed[-1][1]
    if picked[0] is not None:
        saved = format_bytes(max(unquantized.num_bytes - picked[1].num_bytes, 0))
        return f"chosen: {picked[1].name} costs {picked[1].loss:.3g} nats for {saved} less"
    if len(listed) == 1:
        return "chosen: not quantized, because no format fits"
    best = min((o for f, o in listed if f), key=lambda o: o.loss)
    saved = format_bytes(max(unquantized.num_bytes - best.num_bytes, 0))
    return f"chosen: not quantized, because {best.name} costs {best.loss:.3g} nats for {saved} less"


def _apply_choice(
    decision: Decision, recipe: Recipe, number_format: RecipeFormat | None, reason: str
) -> Decision:
    size = estimate_bytes(recipe, decision.module, number_format)
    return replace(decision, format=number_format, reason=reason, num_bytes=size, choices=())
