"""Loads recipes of any dialect, and reads the Megatron dialect.

Megatron's matchers are tried in order and the first match decides, as in megtool; matchers without
`enabled: true` are ignored. Names are those of Megatron modules with the layer number in the whole
model; Megatron itself counts from 0 on every pipeline stage. Only the linear layers of attention
and MLPs are matched, never the router, the embedding or the output layer.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from megtool.errors import FormatError, RecipeError, StorageError
from megtool.quant.recipes.compressed_arguments import check_values
from megtool.quant.recipes.dialect_compressed import read_compressed
from megtool.quant.recipes.dialect_modelopt import read_modelopt
from megtool.quant.recipes.formats import FORMATS, RecipeFormat
from megtool.quant.recipes.located_yaml import MAX_BYTES, Node, read_documents
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.recipe import Recipe, check_keys, read_recipe
from megtool.quant.recipes.rules import KEEP, AllOf, Glob, RecipeProblems, RecipeRule, Role
from megtool.storage.files import read_limited
from megtool.storage.location.path import location, resolve_links

_PACKAGE = "megtool.quant_recipes"
_QUANTIZED_ROLES = Role(("qkv", "proj", "fc1", "fc2"))
_MATCHER = ("config", "type", "pattern", "enabled")
_PAYLOAD = (
    "fp8_quantization_recipe",
    "fp4_quantization_recipe",
    "custom_recipe_factory",
    "fp8_format",
    "override_quantized_autocast",
    "override_nonquantized_autocast",
    "tp_only_amax_red",
    "fp8_param",
    "fp4_param",
)
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "custom_recipe_factory": (None,),
    "fp8_format": (None, "e4m3", "hybrid"),
}
_BY_TRAINING = {
    ("tensorwise", None): "FP8",
    ("blockwise", None): "FP8_PB_WO",
    ("mxfp8", None): "MXFP8",
    (None, "nvfp4"): "NVFP4",
}
_DIALECT_KEYS: Mapping[str, tuple[str, ...]] = {
    "megtool": ("rules", "formats"),
    "megatron": ("matchers", "configs"),
    "modelopt": ("quant_cfg", "quantize", "auto_quantize"),
    "compressed-tensors": ("config_groups", "quantization_config"),
}


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes."""
    files = importlib.resources.files(_PACKAGE).iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def read_recipe_text(recipe: str | Path) -> tuple[str, bytes]:
    """Return the name and content of a shipped recipe or of a file.

    Raises:
        RecipeError: it does not exist, or is too large.
    """
    path = location(recipe)
    name = str(recipe)
    if name in recipe_names():
        return name, (importlib.resources.files(_PACKAGE) / f"{name}.yaml").read_bytes()
    try:
        return name, read_limited(path, MAX_BYTES)
    except FormatError as e:
        raise RecipeError(e.message, file=path, hint="a recipe has a few rules") from e
    except StorageError as e:
        raise RecipeError(
            f"there is no recipe {name!r}: {e.message}",
            hint=suggest(name, recipe_names()) + " (or the path of a file)",
        ) from e


def load_recipe(recipe: str | Path, problems: RecipeProblems | None = None) -> Recipe:
    """Load a shipped recipe by name, or a file in any dialect.

    Problems are added to `problems`, or raised if it is None.

    Raises:
        RecipeError: the recipe is invalid; lists all problems with their lines.
    """
    file, text = read_recipe_text(recipe)
    documents = read_documents(text, file=file)
    if len(documents) != 1:
        raise RecipeError(f"there are {len(documents)} YAML documents, not one", file=file)
    path = location(recipe)
    root = resolve_links(path).parent if path.is_file() else None
    return parse_recipe(documents[0], name=path.stem, problems=problems, file=file, root=root)


def parse_recipe(
    node: Node,
    *,
    name: str,
    file: str,
    problems: RecipeProblems | None = None,
    root: Path | None = None,
) -> Recipe:
    """Convert parsed YAML of any dialect to a recipe."""
    collected = problems or RecipeProblems(file)
    dialect = _detect_dialect(node, collected)
    if dialect == "megatron":
        recipe = _read_megatron(node, name, collected)
    elif dialect == "modelopt":
        recipe = read_modelopt(node, name, collected, root=root)
    elif dialect == "compressed-tensors":
        recipe = read_compressed(node, name, collected)
    else:
        recipe = read_recipe(node, name, collected)
    if problems is None:
        collected.raise_all()
    return recipe


def _detect_dialect(node: Node, problems: RecipeProblems) -> str:
    if not isinstance(node.value, dict):
        raise RecipeError(
            f"line {node.line}: a recipe is a mapping", file=problems.file, hint="rules: [...]"
        )
    for dialect, dialect_keys in _DIALECT_KEYS.items():
        if any(sign in node.value for sign in dialect_keys):
            return dialect
    keys = [sign for dialect_keys in _DIALECT_KEYS.values() for sign in dialect_keys]
    for key in node.value:
        for dialect, dialect_keys in _DIALECT_KEYS.items():
            if suggest(key, keys).startswith("did you mean") and any(
                repr(s) in suggest(key, keys) for s in dialect_keys
            ):
                return dialect
    return "megtool"


def _read_megatron(node: Node, name: str, problems: RecipeProblems) -> Recipe:
    check_keys(node, ("configs", "matchers"), "Megatron recipe", problems)
    configs, matchers = node.get("configs"), node.get("matchers")
    formats: dict[str, RecipeFormat | None] = {}
    if configs is not None and not isinstance(configs.value, dict):
        problems.add(configs.line, f"configs is {configs.plain()!r}", "a mapping")
    for key, payload in configs.value.items() if _is_mapping(configs) else ():
        formats[key] = _config_format(key, payload, problems)
    rules = []
    off = 0
    if not _is_mapping(matchers):
        problems.add(node.line, "no matchers", "a mapping from names to matchers")
    for key, matcher in matchers.value.items() if _is_mapping(matchers) else ():
        if not check_keys(matcher, _MATCHER, "matcher", problems):
            continue
        enabled = matcher.get("enabled")
        if enabled is None or not enabled.value:
            off += 1
            continue
        if rule := _matcher(key, matcher, formats, problems):
            rules.append(rule)
    notes = (f"{off} matchers do not say `enabled: true` and are off",) if off else ()
    return Recipe(
        name=name,
        description="",
        dialect="megatron",
        scheme="megatron",
        strict=False,
        algorithm={"method": "max"},
        formats={k: f for k, f in formats.items() if f is not None},
        rules=tuple(rules),
        notes=notes,
    )


def _is_mapping(node: Node | None) -> TypeGuard[Node]:
    return node is not None and isinstance(node.value, dict)


def _matcher(
    key: str, node: Node, formats: Mapping[str, RecipeFormat | None], problems: RecipeProblems
) -> RecipeRule | None:
    config, kind, pattern = (node.get(k) for k in ("config", "type", "pattern"))
    if config is None or kind is None or pattern is None or not isinstance(pattern.value, str):
        problems.add(node.line, f"matcher {key!r} needs type, pattern and config")
        return None
    if kind.value != "glob":
        problems.add(kind.line, f"matcher {key!r} is of type {kind.plain()!r}", "Megatron has glob")
    if config.text not in formats:
        hint = suggest(config.text, formats)
        problems.add(config.line, f"matcher {key!r} names no config: {config.plain()!r}", hint)
    format = formats.get(config.text)
    return RecipeRule(
        condition=AllOf((Glob((pattern.value,), "megatron"), _QUANTIZED_ROLES)),
        format=format.name if format else KEEP,
        label=key,
        line=node.line,
        optional=True,
    )


def _config_format(key: str, node: Node, problems: RecipeProblems) -> RecipeFormat | None:
    """The format closest to Transformer Engine's training recipe; None for unquantized."""
    training = node.get("training_recipe")
    if not isinstance(node.value, dict) or training is None:
        problems.add(
            node.line,
            f"config {key!r} has no training_recipe",
            "Transformer Engine's (TEQuantizationParams) are understood",
        )
        return None
    keys = ("transformer_engine_config_type", "training_recipe", "evaluation_recipe")
    check_keys(node, keys, "config", problems)
    kind = node.get("transformer_engine_config_type")
    if kind is not None and kind.value != "TEQuantizationParams":
        message = f"config {key!r} is of type {kind.plain()!r}"
        problems.add(kind.line, message, "Megatron has TEQuantizationParams")
    _check_evaluation(key, training, node.get("evaluation_recipe"), problems)
    if not training.value or not check_keys(training, _PAYLOAD, "training_recipe", problems):
        return None
    check_values(training, _PLAIN, problems)
    names = _names(training)
    if names == [None, None]:  # 16 bits, regardless of other keys
        return None
    algo = _BY_TRAINING.get((names[0], names[1]))
    if algo is None:
        problems.add(
            training.line,
            f"config {key!r} has no engine format: fp8 {names[0]}, fp4 {names[1]}",
            "tensorwise, blockwise, mxfp8, or nvfp4 alone",
        )
        return None
    groups = FORMATS[algo].groups
    return RecipeFormat(name=key, algo=algo, group_size=groups[0] if groups else 0, line=node.line)


def _names(recipe: Node) -> list[str | None]:
    """The FP8 and FP4 recipe names of a Transformer Engine recipe."""
    nodes = (recipe.get(k) for k in _PAYLOAD[:2])
    return [n.text if n is not None and n.value is not None else None for n in nodes]


def _check_evaluation(
    key: str, training: Node, evaluation: Node | None, problems: RecipeProblems
) -> None:
    """Check that evaluation and training have the same format."""
    if evaluation is None or evaluation.value is None:
        return
    if not check_keys(evaluation, _PAYLOAD, "evaluation_recipe", problems):
        return
    names = [_names(training), _names(evaluation)]
    if names[0] != names[1]:
        first, second = (next((n for n in pair if n), "16 bits") for pair in names)
        problems.add(
            evaluation.line,
            f"config {key!r} is trained in {first} and evaluated in {second}",
            "remove evaluation_recipe, or set training_recipe to the intended format",
        )
