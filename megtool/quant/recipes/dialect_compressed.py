"""Recipes of compressed-tensors: groups of targets with their settings, less what is ignored.

A target is a full name, a regular expression (`re:`, from the beginning of a name), or a class such
as `Linear`; a name comes before an expression, an expression before a class, and `ignore` before
all. Names are those of the Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.quant.recipes.formats import Format
from megtool.quant.recipes.modules import nearest
from megtool.quant.recipes.recipe import Recipe, check_keys
from megtool.quant.recipes.rules import (
    KEEP,
    Condition,
    Exact,
    OfKind,
    Problems,
    Regex,
    Rule,
    compiled,
    texts,
)
from megtool.quant.recipes.source_text import Node, as_key

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
    "version",
)
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_CLASSES = {"Linear": "linear", "Embedding": "embedding"}

PRESETS: Mapping[str, tuple[str, int]] = {
    "FP8": ("FP8", 0),
    "FP8_DYNAMIC": ("FP8_PER_CHANNEL_PER_TOKEN", 0),
    "FP8_BLOCK": ("FP8_PB_WO", 128),
    "W8A16": ("W8A16", 0),
    "W4A16": ("W4A16_AWQ", 128),
    "NVFP4": ("NVFP4", 16),
    "NVFP4A16": ("W4A16_NVFP4", 16),
    "MXFP8": ("MXFP8", 32),
    "MXFP4": ("MXFP4", 32),
}
"""Schemes by name, with the format and group size each means."""


def read_compressed(node: Node, name: str, problems: Problems) -> Recipe:
    """A `quantization_config` of compressed-tensors, or a config.json that holds one."""
    node = node.get("quantization_config") or node
    check_keys(node, _TOP, "compressed-tensors configuration", problems)
    formats: dict[str, Format] = {}
    rules: list[Rule] = []
    ignored = node.get("ignore")
    if ignored is not None and ignored.value:
        rules += _targets(ignored, KEEP, "ignore", problems)
    found: list[tuple[int, Rule]] = []
    groups = node.get("config_groups")
    if groups is None or not isinstance(groups.value, dict):
        problems.add(node.line, "no config_groups")
    else:
        for key, group in groups.value.items():
            found += _group(key, group, formats, problems)
    rules += [rule for _, rule in sorted(found, key=lambda pair: pair[0])]
    cache = node.get("kv_cache_scheme")
    if cache is not None and cache.value:
        plain = cache.plain()
        if plain != "FP8" and not (
            isinstance(plain, dict) and (plain.get("num_bits"), plain.get("type")) == (8, "float")
        ):
            problems.add(cache.line, f"KV cache as {plain!r}", "only FP8 has a format")
        formats["kv_cache_scheme"] = Format(name="kv_cache_scheme", kv_algo="FP8", line=cache.line)
        cached = Rule(
            condition=OfKind(("kv_cache",)),
            format="kv_cache_scheme",
            label="kv_cache_scheme",
            line=cache.line,
        )
        rules.insert(0, cached)  # a scheme for the whole model, whatever is ignored
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
    key: str, node: Node, formats: dict[str, Format], problems: Problems
) -> list[tuple[int, Rule]]:
    """The rules of a group, each with how exact its target is."""
    targets: Node | None = node
    if isinstance(node.value, list):  # {"W4A16": ["Linear"]}
        if key not in PRESETS:
            problems.add(node.line, f"unknown scheme {key!r}", nearest(key, PRESETS))
            return []
        algo, size = PRESETS[key]
    elif check_keys(node, _GROUP, "group", problems):
        targets = node.get("targets")
        algo, size = _algo(node, key, problems)
    else:
        return []
    if targets is None or not algo:
        if targets is None:
            problems.add(node.line, f"group {key!r} has no targets")
        return []
    formats[key] = Format(name=key, algo=algo, group_size=size, line=node.line)
    return [(_exactness(r), r) for r in _targets(targets, key, key, problems)]


def _exactness(rule: Rule) -> int:
    condition = rule.condition
    return 0 if isinstance(condition, Exact) else 1 if isinstance(condition, Regex) else 2


def _targets(node: Node, format_: str, label: str, problems: Problems) -> list[Rule]:
    out = []
    for text in texts(node, label, problems):
        condition: Condition
        if text.startswith("re:"):
            held = compiled([text.removeprefix("re:")], node.line, problems)
            condition = Regex(held, "hf", prefix=True)
        elif text in _CLASSES:
            condition = OfKind((_CLASSES[text],))
        else:
            condition = Exact((text,), "hf")
        out.append(
            Rule(
                condition=condition,
                format=format_,
                label=f"{label}: {text}",
                line=node.line,
                optional=True,
            )
        )
    return out


def _algo(node: Node, key: str, problems: Problems) -> tuple[str, int]:
    """The format of a group's settings; the empty text where there is none."""
    weights, inputs = (n.plain() if (n := node.get(k)) else None for k in _GROUP[1:3])
    found = _weights(weights) if isinstance(weights, dict) else None
    algo = ""
    if found is not None:
        word, size = found
        algo = _BY_SETTINGS.get((word, _inputs(inputs)), "")
        if algo:
            return algo, size
    problems.add(
        node.line,
        f"group {key!r} has no engine format of ours: weights {_told(weights)}, "
        f"inputs {_told(inputs)}",
        "known: " + ", ".join(PRESETS),
    )
    return "", 0


def _told(args: Any) -> str:
    if not isinstance(args, dict):
        return "as they are"
    said = [f"{args.get('type', 'int')}{args.get('num_bits', 8)}"]
    said += [str(args[k]) for k in ("strategy", "group_size") if args.get(k) is not None]
    return " ".join([*said, *(["asymmetric"] if args.get("symmetric") is False else [])])


_BY_SETTINGS: Mapping[tuple[str, str], str] = {
    ("fp8", "fp8"): "FP8",
    ("fp8_channel", "fp8_token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8_block", ""): "FP8_PB_WO",
    ("fp8_block", "fp8_group"): "FP8_PB_WO",
    ("int8_channel", "int8"): "W8A8_SQ_PER_CHANNEL",
    ("int8_channel", ""): "W8A16",
    ("int4", ""): "W4A16_AWQ",
    ("mxfp8", "mxfp8"): "MXFP8",
    ("mxfp4", "mxfp4"): "MXFP4",
    ("mxfp4", ""): "MXFP4",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4", ""): "W4A16_NVFP4",
}


def _weights(args: Mapping[str, Any]) -> tuple[str, int] | None:
    """Settings of weights as a word and a group size."""
    if args.get("symmetric") is False or args.get("dynamic"):
        return None
    kind = as_key((args.get("type", "int"), args.get("num_bits", 8)))
    strategy, size = as_key((args.get("strategy"), args.get("group_size") or 0))
    if strategy is None:
        strategy = "group" if size else "tensor"
    if kind == ("float", 8):
        if strategy == "block":
            return ("fp8_block", 128) if args.get("block_structure") in _BLOCKS else None
        if strategy == "group":
            return ("mxfp8", 32) if size == 32 else None
        return {"tensor": ("fp8", 0), "channel": ("fp8_channel", 0)}.get(strategy)
    if kind == ("float", 4):
        return {32: ("mxfp4", 32), 16: ("nvfp4", 16)}.get(size)
    if kind == ("int", 8):
        return ("int8_channel", 0) if strategy == "channel" else None
    if kind == ("int", 4) and strategy == "group" and size in (32, 64, 128, 256):
        return "int4", size
    return None


_BLOCKS = ([128, 128], "128x128")


def _inputs(args: Any) -> str:
    """Settings of inputs as a word; the empty one where they stay as they are."""
    if not isinstance(args, dict):
        return ""
    kind = as_key((args.get("type", "int"), args.get("num_bits", 8)))
    strategy, size = as_key((args.get("strategy") or "tensor", args.get("group_size") or 0))
    if kind == ("float", 8) and strategy == "group":
        return {32: "mxfp8", 128: "fp8_group"}.get(size, "other")
    if kind == ("float", 4):
        return {32: "mxfp4", 16: "nvfp4"}.get(size, "other")
    name = {("float", 8): "fp8", ("int", 8): "int8"}.get(kind, "other")
    if strategy == "token":
        return f"{name}_token"
    return name if not args.get("dynamic") else "other"
