"""Reads compressed-tensors recipes: groups of targets with their arguments, minus `ignore`.

A target is a full name, a regular expression (`re:`, matched from the beginning of a name), or a
class such as `Linear`. Names take precedence over expressions, expressions over classes, and
`ignore` over all. Names are those of the Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.quant.recipes.compressed_arguments import (
    EXPRESSION,
    PRESETS,
    check_arguments,
    check_values,
    describe_arguments,
    find_algo,
)
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.recipe import Recipe, check_keys
from megtool.quant.recipes.rules import (
    KEEP,
    Condition,
    Exact,
    OfKind,
    RecipeProblems,
    RecipeRule,
    Regex,
    compile_patterns,
    read_texts,
)

_TOP = (
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "format",
    "quant_method",
    "quantization_status",
    "global_compression_ratio",
    "sparsity_config",
    "transform_config",
    "moe_sparsity_config",
    "version",
)
_PLAIN_TOP: Mapping[str, tuple[Any, ...]] = {
    "quant_method": (None, "compressed-tensors"),
    "transform_config": (None, {}),
    "sparsity_config": (None, {}, {"format": "dense"}),
    "moe_sparsity_config": (None, {}),
}
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_CLASSES = {"Linear": "linear", "Embedding": "embedding"}


def read_compressed(node: Node, name: str, problems: RecipeProblems) -> Recipe:
    """Read a `quantization_config` of compressed-tensors, or a config.json that contains one."""
    node = node.get("quantization_config") or node
    if check_keys(node, _TOP, "compressed-tensors configuration", problems):
        check_values(node, _PLAIN_TOP, problems)
    formats: dict[str, RecipeFormat] = {}
    rules: list[RecipeRule] = []
    ignored = node.get("ignore")
    if ignored is not None and ignored.value:
        rules += _targets(ignored, KEEP, "ignore", problems)
    ranked: list[tuple[int, RecipeRule]] = []
    groups = node.get("config_groups")
    if groups is None or not isinstance(groups.value, dict):
        problems.add(node.line, "no config_groups")
    else:
        for key, group in groups.value.items():
            ranked += _group(key, group, formats, problems)
    rules += [rule for _, rule in sorted(ranked, key=lambda pair: pair[0])]
    cache = node.get("kv_cache_scheme")
    if cache is not None and cache.value:
        plain = cache.plain()
        if plain != "FP8" and not (
            isinstance(plain, dict) and (plain.get("num_bits"), plain.get("type")) == (8, "float")
        ):
            problems.add(cache.line, f"KV cache as {plain!r}", "only FP8 has a format")
        elif isinstance(plain, dict):
            check_arguments(cache, "kv_cache_scheme", problems)
        formats["kv_cache_scheme"] = RecipeFormat(
            name="kv_cache_scheme", kv_algo="FP8", line=cache.line
        )
        cached = RecipeRule(
            condition=OfKind(("kv_cache",)),
            format="kv_cache_scheme",
            label="kv_cache_scheme",
            line=cache.line,
        )
        rules.insert(0, cached)  # a scheme for the whole model, regardless of ignore
    return Recipe(
        name=name,
        description="",
        dialect="compressed-tensors",
        scheme="hf",
        strict=False,
        algorithm={"method": "max"},
        formats=formats,
        rules=tuple(rules),
    )


def _group(
    key: str, node: Node, formats: dict[str, RecipeFormat], problems: RecipeProblems
) -> list[tuple[int, RecipeRule]]:
    """The rules of a group, each with the rank of its target."""
    targets: Node | None = node
    method = ""
    if isinstance(node.value, list):  # {"W4A16": ["Linear"]}
        if key not in PRESETS:
            problems.add(node.line, f"unknown scheme {key!r}", suggest(key, PRESETS))
            return []
        algo, size = PRESETS[key]
    elif check_keys(node, _GROUP, "group", problems):
        targets = node.get("targets")
        check_values(node, {"output_activations": (None, {})}, problems)
        for part in ("weights", "input_activations"):
            if (arguments := node.get(part)) is not None and arguments.value is not None:
                method = check_arguments(arguments, part, problems) or method
        algo, size = _algo(node, key, problems)
    else:
        return []
    if targets is None or not algo:
        if targets is None:
            problems.add(node.line, f"group {key!r} has no targets")
        return []
    formats[key] = RecipeFormat(name=key, algo=algo, group_size=size, method=method, line=node.line)
    return [(_target_rank(r), r) for r in _targets(targets, key, key, problems)]


def _target_rank(rule: RecipeRule) -> int:
    condition = rule.condition
    return 0 if isinstance(condition, Exact) else 1 if isinstance(condition, Regex) else 2


def _targets(node: Node, format_: str, label: str, problems: RecipeProblems) -> list[RecipeRule]:
    out = []
    for text in read_texts(node, label, problems):
        condition: Condition
        if text.startswith(EXPRESSION):
            patterns = compile_patterns([text.removeprefix(EXPRESSION)], node.line, problems)
            condition = Regex(patterns, "hf", prefix=True)
        elif text in _CLASSES:
            condition = OfKind((_CLASSES[text],))
        else:
            condition = Exact((text,), "hf")
        out.append(
            RecipeRule(
                condition=condition,
                format=format_,
                label=f"{label}: {text}",
                line=node.line,
                optional=True,
            )
        )
    return out


def _algo(node: Node, key: str, problems: RecipeProblems) -> tuple[str, int]:
    """The format of a group's arguments, or "" if there is none."""
    weights, inputs = (n.plain() if (n := node.get(k)) else None for k in _GROUP[1:3])
    algo, size = find_algo(weights, inputs)
    if not algo:
        problems.add(
            node.line,
            f"group {key!r} has no engine format of ours: weights {describe_arguments(weights)}, "
            f"inputs {describe_arguments(inputs)}",
            "known: " + ", ".join(PRESETS),
        )
    return algo, size
