"""ModelOpt quantizer entries: which quantizers they match, and the resulting formats.

Weights and inputs of a module are decided separately, each by the last matching entry; together
they must be a format that engines support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megtool.quant.recipes.formats import FORMATS, RecipeFormat
from megtool.quant.recipes.modelopt_settings import (
    UNWRITTEN,
    classify_quantizer,
    read_block_scales,
    read_constant_amax,
    unsupported_features,
)
from megtool.quant.recipes.modules import ModuleInfo
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import KEEP, RecipeProblems

_CLASSES = {"nn.Linear": "linear", "nn.Embedding": "embedding"}


# Formats by the settings of a weight and of its inputs; group sizes are checked separately.
ALGOS: Mapping[tuple[str, str], str] = {
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
class QuantizerPattern:
    """The quantizers that an entry matches, as a condition on modules."""

    pattern: str
    parent_class: str

    def matches(self, module: ModuleInfo) -> bool:
        """Whether any quantizer of the module matches."""
        return any(self.matches_quantizer(module, part) for part in _PARTS[module.kind])

    def matches_quantizer(self, module: ModuleInfo, part: str) -> bool:
        """Whether a quantizer of the module matches."""
        if self.parent_class and _CLASSES.get(self.parent_class) != module.kind:
            return False
        return any(fnmatchcase(f"{n}.{part}", self.pattern) for n in module.names_in("hf"))

    def describe(self) -> str:
        """The condition in words."""
        inside = f" in {self.parent_class}" if self.parent_class else ""
        return f"quantizer like {self.pattern}{inside}"


_PARTS = {
    "linear": ("weight_quantizer", "input_quantizer", "output_quantizer"),
    "embedding": ("weight_quantizer", "input_quantizer", "output_quantizer"),
    "norm": (),
    "kv_cache": ("k_bmm_quantizer", "v_bmm_quantizer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerSetting:
    """An entry: settings (None: unchanged), and whether the quantizer is enabled."""

    quantizers: QuantizerPattern
    cfg: Any
    enable: bool
    rule: int


def decide_by_quantizers(
    recipe: Recipe, module: ModuleInfo, problems: RecipeProblems
) -> tuple[RecipeFormat | None, tuple[int, ...], str]:
    """Return the format, rules and reason for a module, by ModelOpt's precedence."""
    answers = [_decide(space, module, recipe, problems) for space in recipe.spaces]
    if len(answers) == 1:
        return answers[0]
    formats = {f.label: f for f, _, _ in answers if f is not None}
    rules = tuple(dict.fromkeys(i for _, numbers, _ in answers for i in numbers))
    if not formats:
        return None, rules, answers[0][2]
    choice = RecipeFormat(name="auto", choose=(*formats, KEEP), bits=recipe.bits)
    return choice, rules, "chosen by sensitivity within a budget"


def _decide(
    space: tuple[QuantizerSetting, ...],
    module: ModuleInfo,
    recipe: Recipe,
    problems: RecipeProblems,
) -> tuple[RecipeFormat | None, tuple[int, ...], str]:
    settings: dict[str, tuple[Any, bool, int]] = {}
    for setting in space:
        for part in _PARTS[module.kind]:
            if setting.quantizers.matches_quantizer(module, part):
                before = settings.get(part, (None, False, -1))
                cfg = setting.cfg if setting.cfg is not None else before[0]
                settings[part] = (cfg, setting.enable, setting.rule)
    if not settings:
        return None, (), "no entry matches"
    parts = _PARTS[module.kind]
    first = settings.get(parts[0], (None, False, -1))
    second = settings.get(parts[1], (None, False, -1))
    numbers = tuple(dict.fromkeys(n for n in (first[2], second[2]) if n >= 0))
    reason = " and ".join(f"{p} by entry {settings[p][2] + 1}" for p in parts[:2] if p in settings)
    _check_unsupported(settings, recipe, problems)
    if not (first[1] or second[1]):
        return None, numbers, f"switched off: {reason}"
    groups: list[int] = []
    inputs: list[int] = []
    kinds = [
        classify_quantizer(s[0], sizes) if s[1] else ("", "")
        for s, sizes in ((first, groups), (second, inputs))
    ]
    if module.kind == "kv_cache":
        kv = {"fp8": "FP8", "nvfp4": "NVFP4"}.get(kinds[0][0])
        if kv is None or kinds[0][0] != kinds[1][0]:
            _refuse(module, kinds, recipe, numbers, problems)
            return None, numbers, reason
        constant = bool(isinstance(first[0], dict) and first[0].get("use_constant_amax"))
        return RecipeFormat(name=f"kv_{kv.lower()}", kv_algo=kv, constant=constant), numbers, reason
    algo = ALGOS.get((kinds[0][0], kinds[1][0]))
    size = groups[0] if groups else 0
    alike = kinds[0][0] != kinds[1][0] or groups == inputs
    if algo is None or size not in (FORMATS[algo].groups or (0,)) or not alike:
        _refuse(module, kinds, recipe, numbers, problems, size)
        return None, numbers, reason
    constant_amax = read_constant_amax(second[0]) if second[1] else 0.0
    if constant_amax and not FORMATS[algo].calibrates:
        message = f"{algo} scales inputs as they come, and a constant amax is not supported"
        problems.add(recipe.rules[second[2]].line, message, "leave it out")
    block_scales = read_block_scales(first[0]) if first[1] else ""
    blocks = [block_scales] if block_scales else []
    method = ""
    if recipe.method == "svdquant":
        skipped = recipe.algorithm.get("skip_layers") or ()
        is_skipped = any(fnmatchcase(n, p) for n in module.names_in("hf") for p in skipped)
        if is_skipped or module.kind != "linear":
            method = "max"
        elif algo == "NVFP4":
            algo = "NVFP4_SVD"
        else:
            message = f"svdquant is for NVFP4 weights with inputs, and {module.name} is {algo}"
            problems.add(recipe.rules[numbers[0]].line, message, "name it in skip_layers")
    format = RecipeFormat(
        name=" ".join(
            [f"{algo} {size}", *([f"{constant_amax:g}"] if constant_amax else []), *blocks]
        ),
        algo=algo,
        group_size=size,
        input_amax=constant_amax,
        method=method,
        block_scales=block_scales,
        line=recipe.rules[numbers[0]].line,
    )
    return format, numbers, reason


def _check_unsupported(
    settings: Mapping[str, tuple[Any, bool, int]],
    recipe: Recipe,
    problems: RecipeProblems,
) -> None:
    """Check enabled quantizers for features that no engine format has."""
    for part, (cfg, enable, number) in settings.items():
        rule = recipe.rules[number]
        if enable and part == "output_quantizer":
            message = (
                f"{rule.condition.describe()} quantizes outputs, which no engine format supports"
            )
            problems.add(rule.line, message, "disable output_quantizer")
        elif enable:
            for feature in unsupported_features(cfg, part):
                default = "which is not supported", "leave it out, or disable it"
                reason, hint = UNWRITTEN.get(feature.partition(" ")[0], default)
                message = f"{rule.condition.describe()} has {feature}, {_no_format(reason)}"
                problems.add(rule.line, message, hint)


def _refuse(
    module: ModuleInfo,
    kinds: list[tuple[str, str]],
    recipe: Recipe,
    numbers: tuple[int, ...],
    problems: RecipeProblems,
    size: int = 0,
) -> None:
    scheme = " with ".join(k[0] or k[1] or "nothing" for k in kinds)
    scheme += f" in groups of {size}" if size else ""
    message = f"no engine format has {scheme}, which "
    message += f"{'the KV cache' if 'kv' in module.roles else 'it'} would get"
    hint = "weights with inputs: " + ", ".join(f"{w} with {i or 'none'}" for w, i in ALGOS)
    for name, (reason, way_out) in UNWRITTEN.items():
        if name in scheme:
            message, hint = f"{message}, and {reason}", way_out
    problems.add(recipe.rules[numbers[0]].line, message, hint)


def _no_format(reason: str) -> str:
    return reason if reason.startswith("which") else f"which no engine format has: {reason}"
