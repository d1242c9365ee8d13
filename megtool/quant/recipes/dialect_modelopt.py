"""ModelOpt's recipes: lists of quantizer settings, where the last entry that matches wins.

An entry names quantizers (`*weight_quantizer`) by a glob over the names that modules have in
`transformers`, so weights and inputs of one module are decided separately: an entry with `cfg`
replaces what was said before, one with `enable` alone only switches on or off. Names are those of
the Hugging Face checkpoint, which differ from modules' names where transformers has renamed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megtool.quant.recipes.formats import FORMATS, Format
from megtool.quant.recipes.modelopt_imports import Imports
from megtool.quant.recipes.modules import Module
from megtool.quant.recipes.recipe import Recipe, check_keys
from megtool.quant.recipes.rules import KEEP, Problems, Rule
from megtool.quant.recipes.source_text import Node, as_key

_ENTRY = ("quantizer_name", "parent_class", "cfg", "enable")
_TOP = ("imports", "metadata", "quantize", "auto_quantize", "quant_cfg", "algorithm", "kv_cache")
_FLOATS = {"e4m3": (4, 3), "e2m1": (2, 1), "e8m0": (8, 0), "e5m2": (5, 2), "e3m2": (3, 2)}
_CLASSES = {"nn.Linear": "linear", "nn.Embedding": "embedding"}

# What the settings of a weight and of its inputs are together; group sizes are kept apart.
_ALGOS: Mapping[tuple[str, str], str] = {
    ("fp8", "fp8"): "FP8",
    ("fp8_channel", "fp8_token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8_block", ""): "FP8_PB_WO",
    ("int8_channel", "int8"): "W8A8_SQ_PER_CHANNEL",
    ("int8_channel", ""): "W8A16",
    ("int4", ""): "W4A16_AWQ",
    ("int4+fp8", "fp8"): "W4A8_AWQ",
    ("mxfp8", "mxfp8"): "MXFP8",
    ("mxfp4", "mxfp4"): "MXFP4",
    ("mxfp4", ""): "MXFP4",
    ("mxfp4", "fp8"): "W4A8_MXFP4_FP8",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4", ""): "W4A16_NVFP4",
    ("nvfp4", "fp8"): "W4A8_NVFP4_FP8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizers:
    """The quantizers that an entry names, as a condition on modules."""

    pattern: str
    parent_class: str

    def holds(self, module: Module) -> bool:
        """Any quantizer of the module is named."""
        return any(self.names(module, part) for part in _PARTS[module.kind])

    def names(self, module: Module, part: str) -> bool:
        """One quantizer of the module is named."""
        if self.parent_class and _CLASSES.get(self.parent_class) != module.kind:
            return False
        return any(fnmatchcase(f"{n}.{part}", self.pattern) for n in module.called("hf"))

    def words(self) -> str:
        """The condition for people."""
        inside = f" in {self.parent_class}" if self.parent_class else ""
        return f"quantizer like {self.pattern}{inside}"


_PARTS = {
    "linear": ("weight_quantizer", "input_quantizer", "output_quantizer"),
    "embedding": ("weight_quantizer", "input_quantizer", "output_quantizer"),
    "norm": (),
    "kv_cache": ("k_bmm_quantizer", "v_bmm_quantizer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an entry says: settings (None: none of its own), and whether they are switched on."""

    quantizers: Quantizers
    cfg: Any
    enable: bool
    rule: int


def read_modelopt(node: Node, name: str, problems: Problems, *, root: Path | None = None) -> Recipe:
    """A recipe file or a `quant_cfg` of ModelOpt's.

    `root` is the folder of the file: imports are looked for in it, in the folders above, and in the
    installed package `modelopt_recipes`, without running any of it.
    """
    node = Imports(root, problems).resolved(node)
    check_keys(node, _TOP, "ModelOpt recipe", problems)
    metadata = node.get("metadata")
    described = metadata.get("description") if metadata else None
    rules: list[Rule] = []
    spaces: list[tuple[Setting, ...]] = []
    body = node.get("quantize") or node
    auto, bits = node.get("auto_quantize"), 0.0
    if auto is not None:
        bits = _auto(auto, rules, spaces, problems)
    elif (entries := body.get("quant_cfg")) is not None:
        spaces.append(_entries(entries, rules, problems))
    else:
        problems.add(node.line, "no quant_cfg", "under quantize, or at the top")
    notes = []
    if spaces and not _begins_disabled(spaces[0]):
        notes.append(
            "ModelOpt quantises to INT8 whatever no entry names; here it is kept, and "
            "{quantizer_name: '*', enable: false} as the first entry says so"
        )
    algorithm = body.get("algorithm")
    plain = algorithm.plain() if algorithm else None
    if auto is not None:
        method = auto.get("auto_quantize_method")
        plain = method.plain() if method else "gradient"
    return Recipe(
        name=name,
        description=" ".join(described.text.split()) if described else "",
        dialect="modelopt",
        scheme="hf",
        first_wins=False,
        strict=False,
        algorithm=plain if isinstance(plain, dict) else {"method": _method(plain)},
        rules=tuple(rules),
        notes=tuple(notes),
        spaces=tuple(spaces),
        bits=bits,
    )


def _method(plain: Any) -> str:
    return "none" if plain is None else str(plain)


def _begins_disabled(space: tuple[Setting, ...]) -> bool:
    return bool(space) and space[0].quantizers.pattern == "*" and not space[0].enable


def _entries(node: Node, rules: list[Rule], problems: Problems) -> tuple[Setting, ...]:
    """The entries of a list, in today's form or in one of the older ones."""
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
    for one in (new for old in raw for new in _renewed(old)):
        if not check_keys(one, _ENTRY, "quant_cfg entry", problems):
            continue
        name, cfg, enable = (one.get(k) for k in ("quantizer_name", "cfg", "enable"))
        if name is None or not isinstance(name.value, str):
            problems.add(one.line, "an entry needs a quantizer_name")
            continue
        plain = cfg.plain() if cfg else None
        if plain is None and (enable is None or enable.value is None):
            problems.add(one.line, f"entry {name.value!r} says nothing", "give it cfg or enable")
            continue
        on = bool(enable.value) if enable is not None and enable.value is not None else True
        parent = one.get("parent_class")
        condition = Quantizers(
            pattern=name.value, parent_class=parent.text if parent and parent.value else ""
        )
        out.append(Setting(quantizers=condition, cfg=plain, enable=on, rule=len(rules)))
        kind = _kind(plain, [])[0] if plain else ""
        said = (kind or "settings of its own") if plain else ("on" if on else "off")
        rules.append(
            Rule(
                condition=condition,
                format=said if on else KEEP,
                label=condition.words(),
                line=one.line,
                optional=True,
            )
        )
    return tuple(out)


def _renewed(node: Node) -> list[Node]:
    """An entry in ModelOpt's older forms, `{pattern: cfg}` and `{nn.Class: {pattern: cfg}}`."""
    if not isinstance(node.value, dict) or "quantizer_name" in node.value or not node.value:
        return [node]
    if set(node.value) & set(_ENTRY):
        return [node]
    out = []
    for key, value in node.value.items():
        inner = value.value if key.startswith("nn.") and isinstance(value.value, dict) else None
        for pattern, cfg in inner.items() if inner else [(key, value)]:
            held = {"quantizer_name": _at(cfg, "*" if pattern == "default" else pattern)}
            if inner:
                held["parent_class"] = _at(cfg, key)
            if isinstance(cfg.value, dict):
                rest = {k: v for k, v in cfg.value.items() if k != "enable"}
                if "enable" in cfg.value:
                    held["enable"] = cfg.value["enable"]
                if rest:
                    held["cfg"] = Node(value=rest, line=cfg.line, keys=cfg.keys)
            else:
                held["cfg"] = cfg
            out.append(Node(value=held, line=cfg.line, keys=dict.fromkeys(held, cfg.line)))
    return out


def _at(node: Node, value: Any) -> Node:
    return Node(value=value, line=node.line)


def _auto(
    node: Node, rules: list[Rule], spaces: list[tuple[Setting, ...]], problems: Problems
) -> float:
    """Formats to choose among, as one list of settings each; returns the bits allowed."""
    disabled = node.get("disabled_layers")
    off = [n for n in (disabled.value if disabled and isinstance(disabled.value, list) else [])]
    formats = node.get("candidate_formats")
    if formats is None or not isinstance(formats.value, list) or not formats.value:
        problems.add(node.line, "auto_quantize needs candidate_formats")
        return 0.0
    for one in formats.value:
        listed = one.get("quant_cfg")
        if listed is None:
            problems.add(one.line, "a candidate format needs a quant_cfg")
            continue
        settings = list(_entries(listed, rules, problems))
        for layer in off:
            if isinstance(layer.value, str):
                gone = Node(value=False, line=layer.line)
                name = Node(value=_quantizer_glob(layer.value), line=layer.line)
                entry = Node(value={"quantizer_name": name, "enable": gone}, line=layer.line)
                settings += _entries(Node(value=[entry], line=layer.line), rules, problems)
        spaces.append(tuple(settings))
    limits = node.get("constraints")
    bits = limits.get("effective_bits") if limits else None
    if bits is None or isinstance(bits.value, bool) or not isinstance(bits.value, int | float):
        problems.add(node.line, "auto_quantize needs constraints.effective_bits", "a number")
        return 0.0
    return float(bits.value)


def _quantizer_glob(layer: str) -> str:
    """A glob over layers as one over their quantizers."""
    return layer if layer.endswith("*") else f"{layer}.*"


def decide_by_quantizers(
    recipe: Recipe, module: Module, problems: Problems
) -> tuple[Format | None, tuple[int, ...], str]:
    """The format of a module, the rules that gave it, and why, after ModelOpt's precedence."""
    answers = [_decide(space, module, recipe, problems) for space in recipe.spaces]
    if len(answers) == 1:
        return answers[0]
    formats = {f.label: f for f, _, _ in answers if f is not None}
    rules = tuple(dict.fromkeys(i for _, numbers, _ in answers for i in numbers))
    if not formats:
        return None, rules, answers[0][2]
    choice = Format(name="auto", choose=(*formats, KEEP), bits=recipe.bits)
    return choice, rules, "chosen by sensitivity within a budget"


def _decide(
    space: tuple[Setting, ...], module: Module, recipe: Recipe, problems: Problems
) -> tuple[Format | None, tuple[int, ...], str]:
    found: dict[str, tuple[Any, bool, int]] = {}
    for setting in space:
        for part in _PARTS[module.kind]:
            if setting.quantizers.names(module, part):
                before = found.get(part, (None, False, -1))
                cfg = setting.cfg if setting.cfg is not None else before[0]
                found[part] = (cfg, setting.enable, setting.rule)
    if not found:
        return None, (), "no entry matches"
    parts = _PARTS[module.kind]
    first = found.get(parts[0], (None, False, -1))
    second = found.get(parts[1], (None, False, -1))
    numbers = tuple(dict.fromkeys(n for n in (first[2], second[2]) if n >= 0))
    why = " and ".join(f"{p} by entry {found[p][2] + 1}" for p in parts[:2] if p in found)
    if not (first[1] or second[1]):
        return None, numbers, f"switched off: {why}"
    groups: list[int] = []
    kinds = [
        _kind(s[0], groups if i == 0 else []) if s[1] else ("", "")
        for i, s in enumerate((first, second))
    ]
    if module.kind == "kv_cache":
        kv = {"fp8": "FP8", "nvfp4": "NVFP4"}.get(kinds[0][0])
        if kv is None or kinds[0][0] != kinds[1][0]:
            _refuse(module, kinds, recipe, numbers, problems)
            return None, numbers, why
        constant = bool(isinstance(first[0], dict) and first[0].get("use_constant_amax"))
        return Format(name=f"kv_{kv.lower()}", kv_algo=kv, constant=constant), numbers, why
    algo = _ALGOS.get((kinds[0][0], kinds[1][0]))
    size = groups[0] if groups else 0
    if algo is None or size not in (FORMATS[algo].groups or (0,)):
        _refuse(module, kinds, recipe, numbers, problems, size)
        return None, numbers, why
    line = recipe.rules[numbers[0]].line
    return Format(name=f"{algo} {size}", algo=algo, group_size=size, line=line), numbers, why


def _refuse(
    module: Module,
    kinds: list[tuple[str, str]],
    recipe: Recipe,
    numbers: tuple[int, ...],
    problems: Problems,
    size: int = 0,
) -> None:
    told = " with ".join(k[0] or k[1] or "nothing" for k in kinds)
    told += f" in groups of {size}" if size else ""
    problems.add(
        recipe.rules[numbers[0]].line,
        f"no engine format has {told}, which {'the KV cache' if 'kv' in module.roles else 'it'} "
        "would get",
        "weights with inputs: " + ", ".join(f"{w} with {i or 'none'}" for w, i in _ALGOS),
    )


def _kind(cfg: Any, groups: list[int]) -> tuple[str, str]:
    """Quantizer settings as a word of `_ALGOS`, or as what they say; group sizes to `groups`."""
    if isinstance(cfg, list):
        inner = [_kind(c, groups)[0] for c in cfg]
        return "+".join(inner), str(cfg)
    if not isinstance(cfg, Mapping):
        return "", "INT8 by default"
    bits = _bits(cfg.get("num_bits", 8))
    blocks = cfg.get("block_sizes") or {}
    sizes = {str(k): as_key(v) for k, v in blocks.items()} if isinstance(blocks, Mapping) else {}
    scale = _bits(sizes.get("scale_bits"))
    size, axis = sizes.get("-1"), cfg.get("axis")
    told = f"num_bits {cfg.get('num_bits', 8)}, block_sizes {dict(sizes) or 'none'}, axis {axis}"
    word = ""
    if not sizes:
        by = {None: {(4, 3): "fp8", 8: "int8"}, 0: {(4, 3): "fp8_channel", 8: "int8_channel"}}
        word = by.get(axis, {}).get(bits, "") if isinstance(axis, int | None) else ""
    elif set(sizes) >= {"-1", "-2"}:
        word = "fp8_block" if (bits, size, sizes["-2"]) == ((4, 3), 128, 128) else ""
        size = 128
    elif "-1" in sizes and size is None:
        word = "fp8_token" if (bits, cfg.get("type")) == ((4, 3), "dynamic") else ""
    elif isinstance(size, int):
        word = {
            (4, None): "int4",
            ((4, 3), (8, 0)): "mxfp8" if size == 32 else "",
            ((2, 1), (8, 0)): "mxfp4" if size == 32 else "",
            ((2, 1), (4, 3)): "nvfp4",
        }.get((bits, scale), "")
    if isinstance(size, int) and sizes and not isinstance(size, bool):
        groups.append(size)
    return word, "" if word else told


def _bits(value: Any) -> Any:
    """`num_bits`: an integer, or exponent and mantissa, however it is spelled."""
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    return as_key(value)
