"""Reads ModelOpt recipes: lists of quantizer settings in which the last matching entry wins.

An entry names quantizers (`*weight_quantizer`) by a glob over `transformers` module names, so
weights and inputs of a module are decided separately: an entry with `cfg` replaces earlier
settings, one with only `enable` turns them on or off. Names are those of the Hugging Face
checkpoint, which differ from module names that transformers has renamed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, RecipeError, StorageError
from megtool.quant.recipes.algorithm import SENSITIVITY_METHODS
from megtool.quant.recipes.located_yaml import MAX_BYTES, Node, read_documents
from megtool.quant.recipes.modelopt_quantizers import QuantizerPattern, QuantizerSetting
from megtool.quant.recipes.modelopt_settings import check_settings, classify_quantizer, read_method
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.recipe import Recipe, check_keys
from megtool.quant.recipes.rules import KEEP, RecipeProblems, RecipeRule
from megtool.storage.files import read_limited

_ENTRY = ("quantizer_name", "parent_class", "cfg", "enable")
_TOP = ("imports", "metadata", "quantize", "auto_quantize", "quant_cfg", "algorithm", "kv_cache")
_BODY = ("quant_cfg", "algorithm", "effective_bits")
_AUTO = (
    "constraints",
    "candidate_formats",
    "auto_quantize_method",
    "score_size",
    "disabled_layers",
    "cost_excluded_layers",
    "module_search_spaces",
    "kv_cache",
)


def read_modelopt(
    node: Node, name: str, problems: RecipeProblems, *, root: Path | None = None
) -> Recipe:
    """Read a ModelOpt recipe file or `quant_cfg`.

    `root` is the folder of the file: imports are searched in it, in its parents, and in the
    installed package `modelopt_recipes`, without executing any of it.
    """
    node = ImportResolver(root, problems).resolve(node)
    check_keys(node, _TOP, "ModelOpt recipe", problems)
    metadata = node.get("metadata")
    described = metadata.get("description") if metadata else None
    rules: list[RecipeRule] = []
    spaces: list[tuple[QuantizerSetting, ...]] = []
    body = node.get("quantize") or node
    if body is not node:
        check_keys(body, _BODY, "quantize section", problems)
    auto, bits = node.get("auto_quantize"), 0.0
    if auto is not None:
        bits = _auto(auto, rules, spaces, problems)
    elif (entries := body.get("quant_cfg")) is not None:
        spaces.append(_entries(entries, rules, problems))
    else:
        problems.add(node.line, "no quant_cfg", "under quantize, or at the top")
    notes: list[str] = []
    if spaces and not _begins_disabled(spaces[0]):
        notes.append(
            "ModelOpt quantizes to INT8 whatever no entry names; here it is kept, and "
            "{quantizer_name: '*', enable: false} as the first entry says so"
        )
    algorithm: dict[str, Any]
    if auto is not None:
        algorithm = {"method": _auto_method(auto, problems)}
        notes += _auto_notes(auto)
    else:
        algorithm = read_method(body.get("algorithm"), problems, notes)
    return Recipe(
        name=name,
        description=" ".join(described.text.split()) if described else "",
        dialect="modelopt",
        scheme="hf",
        first_wins=False,
        strict=False,
        algorithm=algorithm,
        rules=tuple(rules),
        notes=tuple(notes),
        spaces=tuple(spaces),
        bits=bits,
    )


def _begins_disabled(space: tuple[QuantizerSetting, ...]) -> bool:
    return bool(space) and space[0].quantizers.pattern == "*" and not space[0].enable


def _entries(
    node: Node, rules: list[RecipeRule], problems: RecipeProblems
) -> tuple[QuantizerSetting, ...]:
    """Read the entries of a list, in the current form or an older one."""
    raw = node.value
    if isinstance(raw, dict):
        lines = node.keys or {}
        raw = [
            Node(value={k: v}, line=lines.get(k, v.line), keys={k: lines.get(k, v.line)})
            for k, v in raw.items()
        ]
    if not isinstance(raw, list):
        problems.add(node.line, f"quant_cfg is {node.plain()!r}", "a list of entries")
        return ()
    out = []
    for entry in (new for old in raw for new in _modernize_entry(old)):
        if not check_keys(entry, _ENTRY, "quant_cfg entry", problems):
            continue
        name, cfg, enable = (entry.get(k) for k in ("quantizer_name", "cfg", "enable"))
        if name is None or not isinstance(name.value, str):
            problems.add(entry.line, "an entry needs a quantizer_name")
            continue
        plain = cfg.plain() if cfg else None
        if cfg is not None:
            check_settings(cfg, problems)
        if plain is None and (enable is None or enable.value is None):
            problems.add(entry.line, f"entry {name.value!r} says nothing", "give it cfg or enable")
            continue
        on = bool(enable.value) if enable is not None and enable.value is not None else True
        parent = entry.get("parent_class")
        condition = QuantizerPattern(
            pattern=name.value, parent_class=parent.text if parent and parent.value else ""
        )
        out.append(QuantizerSetting(quantizers=condition, cfg=plain, enable=on, rule=len(rules)))
        kind = classify_quantizer(plain, [])[0] if plain else ""
        action = (kind or "settings of its own") if plain else ("on" if on else "off")
        rules.append(
            RecipeRule(
                condition=condition,
                format=action if on else KEEP,
                label=condition.describe(),
                line=entry.line,
                optional=True,
            )
        )
    return tuple(out)


def _modernize_entry(node: Node) -> list[Node]:
    """Convert ModelOpt's older forms `{pattern: cfg}` and `{nn.Class: {pattern: cfg}}`."""
    if not isinstance(node.value, dict) or "quantizer_name" in node.value or not node.value:
        return [node]
    if set(node.value) & set(_ENTRY):
        return [node]
    out = []
    for key, value in node.value.items():
        inner = value.value if key.startswith("nn.") and isinstance(value.value, dict) else None
        for pattern, cfg in inner.items() if inner else [(key, value)]:
            entry = {"quantizer_name": _node_at(cfg, "*" if pattern == "default" else pattern)}
            if inner:
                entry["parent_class"] = _node_at(cfg, key)
            if isinstance(cfg.value, dict):
                settings = {k: v for k, v in cfg.value.items() if k != "enable"}
                if "enable" in cfg.value:
                    entry["enable"] = cfg.value["enable"]
                if settings:
                    entry["cfg"] = Node(value=settings, line=cfg.line, keys=cfg.keys)
            else:
                entry["cfg"] = cfg
            out.append(Node(value=entry, line=cfg.line, keys=dict.fromkeys(entry, cfg.line)))
    return out


def _node_at(node: Node, value: Any) -> Node:
    return Node(value=value, line=node.line)


def _auto(
    node: Node,
    rules: list[RecipeRule],
    spaces: list[tuple[QuantizerSetting, ...]],
    problems: RecipeProblems,
) -> float:
    """Read candidate formats as one list of settings each; returns the budget in bits."""
    check_keys(node, _AUTO, "auto_quantize section", problems)
    for key in ("module_search_spaces", "kv_cache"):
        if (value := node.get(key)) is not None and value.value:
            problems.add(value.line, f"{key} of auto_quantize is not supported", "leave it out")
    disabled = node.get("disabled_layers")
    off = [n for n in (disabled.value if disabled and isinstance(disabled.value, list) else [])]
    formats = node.get("candidate_formats")
    if formats is None or not isinstance(formats.value, list) or not formats.value:
        problems.add(node.line, "auto_quantize needs candidate_formats")
        return 0.0
    for candidate in formats.value:
        listed = candidate.get("quant_cfg")
        if listed is None:
            problems.add(candidate.line, "a candidate format needs a quant_cfg")
            continue
        settings = list(_entries(listed, rules, problems))
        for layer in off:
            if isinstance(layer.value, str):
                disabled_ = Node(value=False, line=layer.line)
                name = Node(value=_quantizer_glob(layer.value), line=layer.line)
                entry = Node(value={"quantizer_name": name, "enable": disabled_}, line=layer.line)
                settings += _entries(Node(value=[entry], line=layer.line), rules, problems)
        spaces.append(tuple(settings))
    limits = node.get("constraints")
    bits = limits.get("effective_bits") if limits else None
    if bits is None or isinstance(bits.value, bool) or not isinstance(bits.value, int | float):
        problems.add(node.line, "auto_quantize needs constraints.effective_bits", "a number")
        return 0.0
    return float(bits.value)


def _auto_method(node: Node, problems: RecipeProblems) -> str:
    method = node.get("auto_quantize_method")
    if method is None:
        return "gradient"
    if method.text not in SENSITIVITY_METHODS:
        hint = "one of " + ", ".join(SENSITIVITY_METHODS)
        problems.add(method.line, f"unknown auto_quantize_method {method.plain()!r}", hint)
        return "gradient"
    return method.text


def _auto_notes(node: Node) -> list[str]:
    out = []
    formats = node.get("candidate_formats")
    for candidate in (
        formats.value if formats is not None and isinstance(formats.value, list) else ()
    ):
        method = read_method(candidate.get("algorithm"), RecipeProblems(""), [])["method"]
        if method not in ("max", "none"):
            out.append(f"candidate formats are chosen and scaled with max, not with {method}")
    limits = node.get("constraints")
    model = limits.get("cost_model") if limits else None
    if model is not None and model.value not in ("weight", None):
        out.append(f"every weight counts alike in the budget, not by cost_model {model.text}")
    excluded = node.get("cost_excluded_layers")
    if excluded is not None and excluded.value:
        out.append("the budget is for what is chosen for alone, whatever cost_excluded_layers says")
    return out


def _quantizer_glob(layer: str) -> str:
    """Convert a glob over layers to one over their quantizers."""
    return layer if layer.endswith("*") else f"{layer}.*"


_MAX_IMPORTS = 64


class ImportResolver:
    """Searches imports in a folder, its parents, and the package `modelopt_recipes`.

    The package is located without executing it.
    """

    def __init__(self, root: Path | None, problems: RecipeProblems) -> None:
        self._roots = [root, *root.parents] if root else []
        spec = importlib.util.find_spec("modelopt_recipes")
        self._roots += [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        self._problems, self._left = problems, _MAX_IMPORTS

    def resolve(self, node: Node, above: tuple[str, ...] = ()) -> Node:
        """Return the document with all imports replaced."""
        named = node.get("imports")
        imports: dict[str, Node] = {}
        if named is not None and isinstance(named.value, dict):
            for key, location in named.value.items():
                if isinstance(location.value, str):
                    imports[key] = self._load(location, above)
        return self._substitute(node, imports)

    def _load(self, location: Node, above: tuple[str, ...]) -> Node:
        name = location.value
        self._left -= 1
        if name in above or self._left < 0 or ".." in name or name.startswith("/"):
            self._problems.add(
                location.line,
                f"import {name!r} is circular, absolute, nested too deeply or outside the folder",
            )
            return Node(value={}, line=location.line)
        for root in self._roots:
            for path in (root / f"{name}.yaml", root / f"{name}.yml", root / name):
                if path.is_file():
                    return self._read(path, location, (*above, name))
        self._problems.add(
            location.line,
            f"import {name!r} is not found",
            "imports are searched next to the recipe and in the installed modelopt_recipes",
        )
        return Node(value={}, line=location.line)

    def _read(self, path: Path, location: Node, above: tuple[str, ...]) -> Node:
        try:
            documents = read_documents(read_limited(path, MAX_BYTES), file=path)
        except (FormatError, StorageError, RecipeError) as e:
            self._problems.add(location.line, f"import {location.value!r}: {e}")
            return Node(value={}, line=location.line)
        if len(documents) == 2 and documents[0].get("imports") is not None:
            imports = {
                key: self._load(location, above)
                for key, location in documents[0].value["imports"].value.items()
                if isinstance(location.value, str)
            }
            return self._substitute(documents[1], imports)
        return self.resolve(documents[0], above) if documents else Node(value={}, line=0)

    def _substitute(self, node: Node, imports: Mapping[str, Node]) -> Node:
        if isinstance(node.value, list):
            out: list[Node] = []
            for item in node.value:
                alone = isinstance(item.value, dict) and set(item.value) == {"$import"}
                new = self._substitute(item, imports)
                out += new.value if alone and isinstance(new.value, list) else [new]
            return Node(value=out, line=node.line)
        if not isinstance(node.value, dict):
            return node
        reference = node.value.get("$import")
        values: dict[str, Node] = {}
        for item in (
            (reference.value if isinstance(reference.value, list) else [reference])
            if reference
            else ()
        ):
            imported = imports.get(str(item.value))
            if imported is None:
                hint = suggest(str(item.value), imports) if imports else "no imports are declared"
                self._problems.add(item.line, f"unknown import {item.value!r}", hint)
            elif isinstance(imported.value, list) and len(node.value) == 1:
                return imported
            elif isinstance(imported.value, dict):
                values |= imported.value
        values |= {k: self._substitute(v, imports) for k, v in node.value.items() if k != "$import"}
        values.pop("imports", None)
        return Node(value=values, line=node.line, keys=node.keys)
