"""compressed-tensors arguments of weights and inputs, their formats, and matching of targets.

All keys of compressed-tensors 0.20 are known: keys that do not affect stored tensors are ignored,
unsupported values and unknown keys are problems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megtool.process.patterns import compile_pattern
from megtool.quant.recipes.located_yaml import Node, as_key
from megtool.quant.recipes.recipe import check_keys
from megtool.quant.recipes.rules import RecipeProblems

_ARGUMENTS = (
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
)
_ORDERS = (None, False, "weight", "static")
"""Activation orders that store no column index (`g_idx`)."""
_OBSERVERS = (None, "minmax", "static_minmax", "memoryless_minmax", "memoryless")
_FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")

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
"""Preset schemes by name, with format and group size."""


def check_values(
    node: Node, allowed: Mapping[str, tuple[Any, ...]], problems: RecipeProblems
) -> None:
    """Check keys that are supported only with a few values."""
    for key, values in allowed.items():
        if (value := node.get(key)) is not None and value.plain() not in values:
            line = (node.keys or {}).get(key, value.line)
            shown = str(value.plain())[:60]
            problems.add(line, f"{key} {shown} is not supported", "leave it out, or empty")


def check_arguments(node: Node, part: str, problems: RecipeProblems) -> str:
    """Check the arguments of `part` (weights, input_activations, kv_cache_scheme).

    Returns the algorithm that they imply, or "".
    """
    if not check_keys(node, _ARGUMENTS, f"{part} section", problems):
        return ""
    values = {k: v.plain() for k, v in node.value.items()}

    def refuse(key: str, hint: str = "leave it out") -> None:
        line = (node.keys or {}).get(key, node.line)
        shown = str(values.get(key))[:60]
        problems.add(line, f"{key} {shown} of {part} is not supported", hint)

    observer, dynamic = values.get("observer"), values.get("dynamic")
    if values.get("actorder") not in _ORDERS:
        refuse("actorder", "weight, or leave it out")
    if part == "kv_cache_scheme":
        if values.get("symmetric") is False:
            refuse("symmetric", "engines have symmetric formats alone")
        if values.get("strategy") not in (None, "tensor"):
            refuse("strategy", "one scale a layer: tensor")
        if dynamic:
            refuse("dynamic", "its scales come from calibration")
    for key in ("scale_dtype", "zp_dtype"):
        if values.get(key) is not None and str(values[key]).removeprefix("torch.") not in _FLOATS:
            refuse(key)
    if dynamic is True:  # no observer is used
        return ""
    if values.get("observer_kwargs") not in (None, {}):
        refuse("observer_kwargs")
    if observer == "mse" and part == "weights":
        return "mse"
    if observer not in _OBSERVERS:
        names = ", ".join(o for o in _OBSERVERS if o)
        refuse("observer", f"known: {names}" + (", mse" if part == "weights" else ""))
    return ""


def find_algo(weights: Any, inputs: Any) -> tuple[str, int]:
    """Find the format of arguments of weights and inputs, and its group size; "" if there is
    none."""
    scheme = _weights(weights) if isinstance(weights, Mapping) else None
    if scheme is None:
        return "", 0
    word, size = scheme
    return _BY_SETTINGS.get((word, _inputs(inputs)), ""), size


def describe_arguments(args: Any) -> str:
    """Describe arguments in words."""
    if not isinstance(args, dict):
        return "as they are"
    words = [f"{args.get('type', 'int')}{args.get('num_bits', 8)}"]
    words += [str(args[k]) for k in ("strategy", "group_size") if args.get(k) is not None]
    return " ".join([*words, *(["asymmetric"] if args.get("symmetric") is False else [])])


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
    """Classify arguments of weights as a word and a group size."""
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
    if kind == ("float", 4) and strategy in ("group", "tensor_group"):
        return {32: ("mxfp4", 32), 16: ("nvfp4", 16)}.get(size)
    if kind == ("int", 8):
        return ("int8_channel", 0) if strategy == "channel" else None
    if kind == ("int", 4) and strategy == "group" and size in (32, 64, 128, 256):
        return "int4", size
    return None


_BLOCKS = ([128, 128], "128x128")


def _inputs(args: Any) -> str:
    """Classify arguments of inputs as a word; "" if inputs are not quantized."""
    if not isinstance(args, dict):
        return ""
    if args.get("symmetric") is False:
        return "other"
    kind = as_key((args.get("type", "int"), args.get("num_bits", 8)))
    dynamic = as_key(args.get("dynamic") or False)
    strategy, size = as_key((args.get("strategy"), args.get("group_size") or 0))
    strategy = strategy or ("group" if size else "tensor")
    if dynamic != {16: "local"}.get(size if kind == ("float", 4) else 0, True) and (
        strategy in ("token", "group", "tensor_group")
    ):
        return "other"
    if kind == ("float", 8) and strategy == "group":
        return {32: "mxfp8", 128: "fp8_group"}.get(size, "other")
    if kind == ("float", 4):
        return {32: "mxfp4", 16: "nvfp4"}.get(size, "other")
    name = {("float", 8): "fp8", ("int", 8): "int8"}.get(kind, "other")
    if strategy == "token":
        return f"{name}_token"
    return name if not args.get("dynamic") else "other"


EXPRESSION = "re:"
"""Prefix of `targets` and `ignore` entries that are regular expressions."""


def means(entry: str, module: str) -> bool:
    """Whether an entry of `targets` or `ignore` matches a module name (an invalid regex: no)."""
    if not entry.startswith(EXPRESSION):
        return entry == module
    try:
        return compile_pattern(entry.removeprefix(EXPRESSION)).match(module) is not None
    except re.error:
        return False
