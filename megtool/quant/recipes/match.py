"""Match: which rule of a recipe decides about each module, why, and what it then weighs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megtool.errors import listed
from megtool.quant.recipes.algorithm import SENSITIVITY_METHODS, is_no_op
from megtool.quant.recipes.formats import (
    FORMATS,
    KV_BITS,
    SMOOTHING_METHODS,
    RecipeFormat,
    largest_group,
)
from megtool.quant.recipes.modelopt_quantizers import decide_by_quantizers
from megtool.quant.recipes.modules import ModuleInfo
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import KEEP, RecipeProblems, RecipeRule, find_unmatched


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of one module.

    `format` is None where it is kept. `rules` are the numbers of the rules that decided (ModelOpt
    decides about weights and inputs by different ones), none where no rule matches; `why` says it.
    `num_bytes` holds scales; for a KV cache it is that of one token. `choices` are the formats a
    search may choose from: `num_bytes` is then what its budget allows.
    """

    module: ModuleInfo
    format: RecipeFormat | None
    rules: tuple[int, ...]
    reason: str
    num_bytes: int
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The format as engines call it."""
        return self.format.label if self.format else KEEP

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.num_bytes / max(self.module.numel, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """The decisions about all modules, and how many modules each rule matches and decides."""

    decisions: tuple[Decision, ...]
    matches: tuple[int, ...]
    decides: tuple[int, ...]
    notes: tuple[str, ...]


def match_rules(
    recipe: Recipe, modules: Sequence[ModuleInfo], problems: RecipeProblems, *, group_size: int = 0
) -> MatchResult:
    """Decide about every module.

    `group_size` replaces that of all formats that have several to choose from (0: their own).

    Adds to `problems` rules without effect, groups that do not divide, and formats that do not suit
    a module.
    """
    holding = [[rule.condition.matches(m) for rule in recipe.rules] for m in modules]
    decisions = []
    for module, holds in zip(modules, holding, strict=True):
        if recipe.spaces:
            format, rules, reason = decide_by_quantizers(recipe, module, problems)
            if format is not None and not _fits(format, module):
                reason = f"{format.label} does not suit {_describe_module(module)}"
                format = None
            decisions.append(_make_decision(recipe, module, format, rules, reason))
        else:
            decisions.append(_decide_by_rules(recipe, module, holds, problems))
    unknown = False
    if group_size:
        decisions = [_with_group_size(recipe, d, group_size) for d in decisions]
        candidates = [
            f for names in {d.choices for d in decisions} for f in _choice_formats(recipe, names)
        ]
        sizes_ = {d.format.group_size for d in decisions if d.format}
        unknown = group_size not in sizes_.union(*(f.number.groups for f in candidates))
        if unknown:
            sizes = {
                g for f in (*(d.format for d in decisions), *candidates) for g in _group_sizes(f)
            }
            hint_ = "one of " + ", ".join(map(str, sorted(sizes))) if sizes else "none has a choice"
            problems.add(0, f"no format of this recipe takes groups of {group_size}", hint_)
    matches = [sum(h[i] for h in holding) for i in range(len(recipe.rules))]
    decides = [0] * len(recipe.rules)
    for d in decisions:
        for i in d.rules:
            decides[i] += 1
    notes = list(recipe.notes)
    faulty = {line for line, _, _ in problems.problems}
    for i, rule in enumerate(recipe.rules):
        if recipe.strict and matches[i] and not rule.optional and rule.line not in faulty:
            for name, hint in find_unmatched(rule.condition, modules):
                rule_text = f" of {rule.label!r}" if rule.label != name else ""
                problems.add(rule.line, f"{name}{rule_text} matches nothing in this model", hint)
        if problem := _explain_no_effect(recipe, i, matches[i], decides[i], holding):
            if recipe.strict:
                if rule.line not in faulty:  # what it asks for is no condition: told already
                    problems.add(rule.line, *problem)
            elif matches[i]:
                notes.append(problem[0])
    if idle := sum(1 for n in matches if not n) if not recipe.strict else 0:
        notes.append(f"{idle} of {len(matches)} rules match nothing in this model")
    _check_group_sizes(decisions, problems, unknown=unknown)
    if not recipe.strict:
        notes += _no_op_notes(recipe, decisions)
        notes += (f"kept: {d.reason}" for d in decisions if "does not suit" in d.reason)
    return MatchResult(
        decisions=tuple(decisions),
        matches=tuple(matches),
        decides=tuple(decides),
        notes=tuple(dict.fromkeys(notes)),
    )


def _no_op_notes(recipe: Recipe, decisions: Sequence[Decision]) -> list[str]:
    """Formats to which the algorithm of a foreign recipe does nothing."""
    algos = dict.fromkeys(
        d.format.algo
        for d in decisions
        if d.format is not None
        and d.format.algo
        and (d.format.method or recipe.method) not in (*SENSITIVITY_METHODS, "none", "None")
        and is_no_op(d.format.method or recipe.method, recipe.algorithm, d.format)
    )
    return [f"{recipe.method} does nothing to {algo} here: it is as with max" for algo in algos]


def _group_sizes(format: RecipeFormat | None) -> tuple[int, ...]:
    """The group sizes that a format may have, where there is a choice."""
    sizes = format.number.groups if format is not None and format.algo else ()
    return sizes if len(sizes) > 1 else ()


def _choice_formats(recipe: Recipe, choices: Sequence[str]) -> list[RecipeFormat]:
    """The formats that a choice is between."""
    formats = (recipe.formats.get(c) or RecipeFormat(name=c, algo=c) for c in choices if c != KEEP)
    return [f for f in formats if f.algo in FORMATS]


def _with_group_size(recipe: Recipe, decision: Decision, size: int) -> Decision:
    if decision.format is None or size not in _group_sizes(decision.format):
        return decision
    format = replace(decision.format, group_size=size)
    return _make_decision(recipe, decision.module, format, decision.rules, decision.reason)


def _decide_by_rules(
    recipe: Recipe, module: ModuleInfo, holds: Sequence[bool], problems: RecipeProblems
) -> Decision:
    numbers = [i for i, is_match in enumerate(holds) if is_match]
    if not numbers:
        return _make_decision(recipe, module, None, (), "no rule matches")
    chosen = numbers[0] if recipe.first_wins else numbers[-1]
    rule = recipe.rules[chosen]
    format = recipe.formats.get(rule.format)
    if format is not None and not _fits(format, module):
        noun = _describe_module(module)
        if recipe.strict:
            problems.add(
                rule.line,
                f"{rule.label!r} gives {format.label} to {module.name}, {noun}",
                "put a rule before it that keeps such modules"
                + (", or take a format for weights alone" if _is_weight_only(module) else ""),
            )
        return _make_decision(
            recipe, module, None, (chosen,), f"{format.label} does not suit {noun}"
        )
    return _make_decision(recipe, module, format, (chosen,), _reason(rule))


def _reason(rule: RecipeRule) -> str:
    return rule.reason or rule.condition.describe()


def _fits(format: RecipeFormat, module: ModuleInfo) -> bool:
    """The module can have the format. What looks rows up, or drafts, is not run in calibration, so
    nothing is known about its inputs."""
    if format.kv_algo:
        return module.kind == "kv_cache"
    if _is_weight_only(module):
        return bool(format.choose) or not format.number.calibrates
    return module.kind == "linear"


def _is_weight_only(module: ModuleInfo) -> bool:
    return module.kind == "embedding" or (module.kind == "linear" and "mtp" in module.roles)


def _describe_module(module: ModuleInfo) -> str:
    if module.kind == "kv_cache":
        return "a KV cache"
    if "mtp" in module.roles and module.kind == "linear":
        return "which drafts: nothing is known about its inputs"
    return "an embedding" if module.kind == "embedding" else f"a {module.kind}"


def _make_decision(
    recipe: Recipe,
    module: ModuleInfo,
    format: RecipeFormat | None,
    rules: tuple[int, ...],
    reason: str,
) -> Decision:
    return Decision(
        module=module,
        format=format,
        rules=rules,
        reason=reason,
        num_bytes=estimate_bytes(recipe, module, format),
        choices=format.choose if format else (),
    )


def estimate_bytes(recipe: Recipe, module: ModuleInfo, format: RecipeFormat | None) -> int:
    """Bytes of a module in a format: codes, scales, and factors of input columns where stored.

    SmoothQuant and AWQ leave such factors with the last projection of attention and of the MLP
    alone; all others are taken by the norm before them.
    """
    if format is None:
        return module.num_bytes
    if format.kv_algo:
        return round(module.numel * KV_BITS[format.kv_algo] / 8)
    if format.choose:
        return round(module.numel * format.bits / 8)
    method = format.method or recipe.method
    smoothed = (
        method in SMOOTHING_METHODS
        and not recipe.folds_scales
        and bool(module.roles & {"proj", "fc2"})
    )
    return format.number.num_bytes(module.shape, format.group_size, smoothed=smoothed)


def _explain_no_effect(
    recipe: Recipe,
    number: int,
    matches: int,
    decides: int,
    holding: Sequence[Sequence[bool]],
) -> tuple[str, str] | None:
    """What to say of a rule that decides nothing; None where that is right."""
    rule = recipe.rules[number]
    if decides or (rule.optional and recipe.strict):
        return None
    if not matches:
        return (
            f"{rule.label!r} matches nothing in this model",
            "`optional: true` where that is right; `explain` with recipe fp8 lists the names",
        )
    shadows: dict[str, None] = {}
    for holds in holding:
        if holds[number]:
            over = [i for i, is_match in enumerate(holds) if is_match and i != number]
            first = over[0] if recipe.first_wins else over[-1]
            shadows[recipe.rules[first].label] = None
    order = "before" if recipe.first_wins else "after"
    by = ", ".join(repr(s) for s in list(shadows)[:3])
    return (
        f"{rule.label!r} decides nothing: all {matches} modules it matches are decided {order} "
        f"it, by {by}",
        "`optional: true` where that is right",
    )


def _check_group_sizes(
    decisions: Sequence[Decision], problems: RecipeProblems, *, unknown: bool = False
) -> None:
    """Groups and blocks divide the weights they are for, and packed rows come in pairs.

    `unknown` says that other groups were asked for than there are, so that nothing is to be said
    about those that a recipe would have.
    """
    wrong: dict[tuple[str, str], list[ModuleInfo]] = defaultdict(list)
    suited: dict[str, list[int]] = defaultdict(list)
    formats: dict[str, RecipeFormat] = {}
    for d in decisions:
        f, m = d.format, d.module
        if f is None or not f.algo or (unknown and _group_sizes(f)):
            continue
        formats[f.name] = f
        suited[f.name] += m.shape if f.number.scaling == "block" else m.shape[1:]
        if f.number.scaling == "block" and (m.shape[0] % f.group_size):
            wrong[f.name, "rows"].append(m)
        elif f.group_size and m.shape[1] % f.group_size:
            wrong[f.name, "columns"].append(m)
        elif f.number.bits == 4 and f.number.groups[0] == 128 and m.shape[0] % 2:
            wrong[f.name, "odd"].append(m)
    for (name, defect), modules in wrong.items():
        f, first = formats[name], modules[0]
        named = listed([m.name for m in modules], 1)
        if defect == "odd":
            problems.add(
                f.line,
                f"{f.algo} packs two rows a byte, and {named} have {first.shape[0]}",
                "keep them with a rule of their own",
            )
            continue
        size = first.shape[0] if defect == "rows" else first.shape[1]
        fitting = largest_group(suited[name], f.group_size)
        hint = "keep them with a rule of their own, or take another format"
        if fitting in f.number.groups:
            hint = f"the largest that does is {fitting} (--group-size {fitting}, or in the recipe)"
        problems.add(
            f.line,
            f"group size {f.group_size} of {f.algo} does not divide the {size} {defect} of {named}",
            hint,
        )
