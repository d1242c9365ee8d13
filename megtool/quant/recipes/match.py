"""Matches the rules of a recipe to modules: the decision about each module, and its size."""

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
    """The decision about one module.

    `format` is None for unquantized modules. `rules` are the numbers of the deciding rules
    (ModelOpt decides weights and inputs by different rules), empty if no rule matches; `reason`
    explains the decision. `num_bytes` includes scales; for a KV cache it is the size of one
    token. `choices` are candidate formats of a search: `num_bytes` is then the budget.
    """

    module: ModuleInfo
    format: RecipeFormat | None
    rules: tuple[int, ...]
    reason: str
    num_bytes: int
    choices: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the format that engines use."""
        return self.format.label if self.format else KEEP

    @property
    def bits(self) -> float:
        """Bits per weight, including scales."""
        return 8 * self.num_bytes / max(self.module.numel, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """All decisions, and how many modules each rule matches and decides."""

    decisions: tuple[Decision, ...]
    matches: tuple[int, ...]
    decides: tuple[int, ...]
    notes: tuple[str, ...]


def match_rules(
    recipe: Recipe,
    modules: Sequence[ModuleInfo],
    problems: RecipeProblems,
    *,
    group_size: int = 0,
    cuts_groups: bool = False,
) -> MatchResult:
    """Decide about every module.

    `group_size` overrides that of all formats with several group sizes (0: no override). With
    `cuts_groups` the last group of a row may be smaller, as in training.

    Adds problems for rules without effect, group sizes that do not divide a weight, and formats
    that a module does not support.
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
                if rule.line not in faulty:  # its condition is invalid, which is reported already
                    problems.add(rule.line, *problem)
            elif matches[i]:
                notes.append(problem[0])
    if idle := sum(1 for n in matches if not n) if not recipe.strict else 0:
        notes.append(f"{idle} of {len(matches)} rules match nothing in this model")
    if not cuts_groups:
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
    """Notes on formats that the algorithm of a foreign recipe does not affect."""
    algos = dict.fromkeys(
        d.format.algo
        for d in decisions
        if d.format is not None
        and d.format.algo
        and (d.format.method or recipe.method) not in (*SENSITIVITY_METHODS, "none", "None")
        and is_no_op(d.format.method or recipe.method, recipe.algorithm, d.format)
    )
    return [f"{recipe.method} has no effect on {algo} here; max is used" for algo in algos]


def _group_sizes(format: RecipeFormat | None) -> tuple[int, ...]:
    """The group sizes of a format, if it has several."""
    sizes = format.number.groups if format is not None and format.algo else ()
    return sizes if len(sizes) > 1 else ()


def _choice_formats(recipe: Recipe, choices: Sequence[str]) -> list[RecipeFormat]:
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
    """Whether the module supports the format. Embeddings and MTP layers do not run in calibration,
    so their inputs are unknown."""
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
        return "an MTP layer, which calibration does not run"
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
    """Estimate the bytes of a module in a format: codes, scales, `pre_quant_scale`, and SVDQuant's
    matrices.

    SmoothQuant and AWQ store a `pre_quant_scale` only for the output projections of attention and
    MLP; all others are absorbed by the preceding norm.
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
        and (format.number.has_branch or bool(module.roles & {"proj", "fc2"}))
    )
    return format.number.num_bytes(
        module.shape, format.group_size, smoothed=smoothed, rank=recipe.rank
    )


def _explain_no_effect(
    recipe: Recipe,
    number: int,
    matches: int,
    decides: int,
    holding: Sequence[Sequence[bool]],
) -> tuple[str, str] | None:
    """Explain why a rule decides nothing; None if that is fine."""
    rule = recipe.rules[number]
    if decides or (rule.optional and recipe.strict):
        return None
    if not matches:
        return (
            f"{rule.label!r} matches nothing in this model",
            "set `optional: true` if intended; `explain` with recipe fp8 lists the names",
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
        "set `optional: true` if intended",
    )


def _check_group_sizes(
    decisions: Sequence[Decision], problems: RecipeProblems, *, unknown: bool = False
) -> None:
    """Check that groups (not blocks) divide their weights, and that packed rows come in pairs.

    `unknown`: an unsupported group size was requested, so the recipe's own sizes are not checked.
    """
    wrong: dict[tuple[str, str], list[ModuleInfo]] = defaultdict(list)
    suited: dict[str, list[int]] = defaultdict(list)
    formats: dict[str, RecipeFormat] = {}
    for d in decisions:
        f, m = d.format, d.module
        if f is None or not f.algo or (unknown and _group_sizes(f)):
            continue
        formats[f.name] = f
        if f.number.scaling == "block":
            continue
        suited[f.name] += m.shape[1:]
        if f.group_size and m.shape[1] % f.group_size:
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
                "keep them unquantized with a separate rule",
            )
            continue
        fitting = largest_group(suited[name], f.group_size)
        hint = "keep them unquantized with a separate rule, or use another format"
        if fitting in f.number.groups:
            hint = f"the largest that does is {fitting} (--group-size {fitting}, or in the recipe)"
        problems.add(
            f.line,
            f"group size {f.group_size} of {f.algo} does not divide the {first.shape[1]} columns "
            f"of {named}",
            hint,
        )
