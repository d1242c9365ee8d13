"""A recipe with formats, an algorithm and ordered rules, and the reader of megtool's own dialect.

Rules are tried from the top and the first match decides, as in Megatron: a rule cannot be undone by
a later one, so exceptions come first. Foreign dialects keep their own precedence
(`megtool.quant.recipes.dialects`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.quant.recipes.algorithm import METHODS, check_methods, read_algorithm
from megtool.quant.recipes.formats import (
    DEFAULT_RANK,
    FORMATS,
    KV_BITS,
    RecipeFormat,
    packing_of,
)
from megtool.quant.recipes.learned_scales import METHOD as LSQ
from megtool.quant.recipes.learned_scales import LearnedScales
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.rotation import RotationMatrices, read_rotation
from megtool.quant.recipes.rules import KEEP, RecipeProblems, RecipeRule, read_condition, read_texts

_TOP = ("description", "algorithm", "rotation", "formats", "rules")
_FORMAT = (
    "algo",
    "kv_algo",
    "choose",
    "bits",
    "group_size",
    "constant",
    "algorithm",
    "round_twice",
)
_RULE = ("name", "match", "format", "optional", "reason")

MAX_RULES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe of any dialect.

    `first_wins`: the first matching rule decides, else the last. `scheme` is the naming scheme of
    patterns. `strict`: rules without effect are errors; recipes of other dialects list names of
    many models. `notes` describe differences from the file. `spaces` are the quantizer settings of
    ModelOpt's entries, several lists if ModelOpt chooses among formats. `rotation` is multiplied
    into the weights first.
    """

    name: str
    description: str
    dialect: str = "megtool"
    scheme: str = "canonical"
    first_wins: bool = True
    strict: bool = True
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    formats: Mapping[str, RecipeFormat] = field(default_factory=dict)
    rules: tuple[RecipeRule, ...] = ()
    notes: tuple[str, ...] = ()
    spaces: tuple[Any, ...] = ()
    bits: float = 0.0
    rotation: RotationMatrices | None = None

    @property
    def folds_scales(self) -> bool:
        """Whether smoothing scales are used only where a norm absorbs them."""
        return bool(self.algorithm.get("fold"))

    @property
    def rank(self) -> int:
        """The rank of SVDQuant's matrices; ModelOpt calls the option `lowrank`."""
        options = self.algorithm if self.method == "svdquant" else {}
        return int(options.get("rank") or options.get("lowrank") or DEFAULT_RANK)

    @property
    def learned_scales(self) -> LearnedScales | None:
        """The scales that training changes; None if it changes none."""
        return LearnedScales.of(self.algorithm)

    @property
    def method(self) -> str:
        """The name of the algorithm."""
        return str(self.algorithm.get("method", "none"))


def read_recipe(node: Node, name: str, problems: RecipeProblems) -> Recipe:
    """Read a recipe in megtool's own dialect; problems are added to `problems`."""
    check_keys(node, _TOP, "recipe", problems)
    described = node.get("description")
    if described is None or not isinstance(described.value, str) or not described.value.strip():
        problems.add(node.line, "a recipe needs a description", "one sentence")
    formats = _formats(node.get("formats"), problems)
    algorithm = read_algorithm(node.get("algorithm"), formats, problems)
    if algorithm["method"] == LSQ:  # scales that are learned are stored
        formats = {n: _with_stored_scales(f) for n, f in formats.items()}
    check_methods(algorithm, formats, problems)
    return Recipe(
        name=name,
        description=" ".join(described.text.split()) if described else "",
        algorithm=algorithm,
        formats=formats,
        rules=_rules(node, formats, problems),
        rotation=read_rotation(node.get("rotation"), problems),
    )


def _with_stored_scales(format: RecipeFormat) -> RecipeFormat:
    is_nvfp4 = bool(format.algo) and packing_of(format).startswith("nvfp4")
    return replace(format, block_scales="static") if is_nvfp4 else format


def check_keys(node: Node, keys: tuple[str, ...], name: str, problems: RecipeProblems) -> bool:
    """Check that the node is a mapping with known keys."""
    if not isinstance(node.value, dict):
        problems.add(node.line, f"{name} is {node.plain()!r}", "a mapping")
        return False
    for key, value in node.value.items():
        if key not in keys:
            line = (node.keys or {}).get(key, value.line)
            problems.add(line, f"unknown key {key!r} of a {name}", suggest(key, keys))
    return True


def _formats(node: Node | None, problems: RecipeProblems) -> dict[str, RecipeFormat]:
    if node is None:
        return {}
    if not isinstance(node.value, dict):
        problems.add(node.line, f"formats is {node.plain()!r}", "a mapping from names to formats")
        return {}
    formats = {}
    for name, value in node.value.items():
        line = (node.keys or {}).get(name, value.line)
        if name == KEEP:
            problems.add(
                line, f"{KEEP!r} is a reserved format name", "it leaves modules unquantized"
            )
        elif check_keys(value, _FORMAT, "format", problems):
            formats[name] = _format(name, value, line, problems)
    for format in formats.values():
        for choice in format.choose:
            if choice != KEEP and (choice not in formats or formats[choice].choose):
                problems.add(
                    format.line, f"{format.name} chooses {choice!r}", suggest(choice, formats)
                )
    return formats


def _format(name: str, node: Node, line: int, problems: RecipeProblems) -> RecipeFormat:
    kinds = {k: v for k in ("algo", "kv_algo", "choose") if (v := node.get(k)) is not None}
    if len(kinds) != 1:
        problems.add(line, f"format {name!r} needs exactly one of algo, kv_algo and choose")
    algo = _read_choice(kinds.get("algo"), "algo", FORMATS, problems)
    kv_algo = _read_choice(kinds.get("kv_algo"), "kv_algo", KV_BITS, problems)
    choose = read_texts(kinds["choose"], "choose", problems) if "choose" in kinds else ()
    bits = _read_number(node.get("bits"), "bits", 0.0, problems)
    if bool(choose) != bool(bits):
        problems.add(line, f"format {name!r}: choose and bits go together")
    constant = node.get("constant")
    if constant is not None and (not kv_algo or not isinstance(constant.value, bool)):
        problems.add(constant.line, "constant is only for a KV cache", "true or false")
    twice = node.get("round_twice")
    if twice is not None and (algo != "FP8" or not isinstance(twice.value, bool)):
        problems.add(twice.line, "round_twice is only for algo: FP8", "true or false")
    chosen = node.get("algorithm")
    method = _read_choice(chosen, "algorithm", METHODS, problems)
    return RecipeFormat(
        name=name,
        algo=algo,
        kv_algo=kv_algo,
        choose=choose,
        group_size=read_group_size(algo, node.get("group_size"), problems),
        bits=bits,
        constant=bool(constant and constant.value),
        method=method,
        round_twice=bool(twice and twice.value),
        line=line,
    )


def read_group_size(algo: str, node: Node | None, problems: RecipeProblems) -> int:
    """Read the group size of a format, which engines must support; the default if absent."""
    sizes = FORMATS[algo].groups if algo in FORMATS else ()
    if node is None:
        return sizes[0] if sizes else 0
    size = node.value
    if not isinstance(size, int) or isinstance(size, bool) or size not in sizes:
        hint = "one of " + ", ".join(map(str, sorted(sizes))) if sizes else f"{algo} has no groups"
        problems.add(node.line, f"group_size is {node.plain()!r}", hint)
        return sizes[0] if sizes else 0
    return size


def _read_choice(
    node: Node | None, key: str, choices: Mapping[str, Any], problems: RecipeProblems
) -> str:
    if node is None:
        return ""
    if node.text not in choices:
        problems.add(node.line, f"unknown {key} {node.plain()!r}", suggest(node.text, choices))
        return ""
    return node.text


def _read_number(node: Node | None, key: str, default: float, problems: RecipeProblems) -> float:
    if node is None:
        return default
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 32:
        problems.add(node.line, f"{key} is {node.plain()!r}", "a number above 0, at most 32")
        return default
    return float(value)


def _rules(
    node: Node, formats: Mapping[str, RecipeFormat], problems: RecipeProblems
) -> tuple[RecipeRule, ...]:
    listed = node.get("rules")
    if listed is None or not isinstance(listed.value, list) or not listed.value:
        problems.add(listed.line if listed else node.line, "a recipe needs a list of rules")
        return ()
    if len(listed.value) > MAX_RULES:
        problems.add(listed.line, f"{len(listed.value)} rules", f"at most {MAX_RULES}")
        return ()
    rules, named = [], set()
    for entry in listed.value:
        if not check_keys(entry, _RULE, "rule", problems):
            continue
        match, chosen, optional = entry.get("match"), entry.get("format"), entry.get("optional")
        if optional is not None and not isinstance(optional.value, bool):
            problems.add(optional.line, f"optional is {optional.plain()!r}", "true or false")
        condition = read_condition(match, problems) if match is not None else None
        if condition is None or chosen is None:
            problems.add(entry.line, "a rule needs match and format")
        if chosen is None:
            continue
        if chosen.text != KEEP and chosen.text not in formats:
            hint = suggest(chosen.text, [*formats, KEEP])
            problems.add(chosen.line, f"unknown format {chosen.plain()!r}", hint)
        if condition is None:
            named.add(chosen.text)
            continue
        name, reason = entry.get("name"), entry.get("reason")
        rules.append(
            RecipeRule(
                condition=condition,
                format=chosen.text,
                label=name.text if name else condition.describe(),
                line=entry.line,
                optional=bool(optional and optional.value),
                reason=" ".join(reason.text.split()) if reason else "",
            )
        )
    used = named | {r.format for r in rules} | {c for f in formats.values() for c in f.choose}
    for format_ in formats.values():
        if format_.name not in used:
            problems.add(format_.line, f"format {format_.name!r} is used by no rule")
    return tuple(rules)
