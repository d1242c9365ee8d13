"""Calibration methods, their options, and the formats that each has an effect on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megtool.quant.recipes.formats import (
    SMOOTHING_METHODS,
    RecipeFormat,
    can_smooth,
    chooses_codes,
    packing_of,
)
from megtool.quant.recipes.learned_scales import METHOD as LSQ
from megtool.quant.recipes.learned_scales import check_tied, has_learnable_scales
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.rules import RecipeProblems


@dataclass(frozen=True, slots=True)
class AlgorithmOption:
    """The type and inclusive range of an option; `excludes_minimum` makes the lower bound
    exclusive. With `choices` it has one of these values."""

    kind: type
    minimum: float = 0.0
    maximum: float = 1.0
    excludes_minimum: bool = False
    choices: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether the value has the type and is in the range; NaN and Inf never are."""
        if self.choices:
            return value in self.choices
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        types = int if self.kind is int else int | float
        if not isinstance(value, types) or not math.isfinite(value):
            return False
        return self.minimum <= value <= self.maximum and not (
            self.excludes_minimum and value == self.minimum
        )

    def describe(self) -> str:
        """The range in words."""
        if self.choices:
            return "one of " + ", ".join(_write_choice(c) for c in self.choices)
        if self.kind is bool:
            return "true or false"
        kind = "a whole number" if self.kind is int else "a number"
        low = f"above {self.minimum:g}" if self.excludes_minimum else f"from {self.minimum:g}"
        return f"{kind} {low} {'up ' if self.excludes_minimum else ''}to {self.maximum:g}"


def _write_choice(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


_FLAG = AlgorithmOption(bool)
_SHARE = AlgorithmOption(float)
_STEP = AlgorithmOption(float, minimum=0.001)
_FP4_SCALES = {"four_over_six": _FLAG, "scale_search": _FLAG}
_LEARNED = {
    "steps": AlgorithmOption(int, minimum=1, maximum=100_000),
    "batch_size": AlgorithmOption(int, minimum=1, maximum=1024),
    "learning_rate": _SHARE,
    "normalize_tokens": _FLAG,
}
_DESCENT = ("steps", "batch_size", "learning_rate")
"""Options of learned rounding that nothing else reads."""
_GPTQ = {
    **_FP4_SCALES,
    "learned_rounding": _FLAG,
    **_LEARNED,
    "damping": AlgorithmOption(float, maximum=100.0),
    "shrinkage": _SHARE,
    "compensate_inputs": _FLAG,
    "desc_act": _FLAG,
    "clip": _FLAG,
    "refinements": AlgorithmOption(int, maximum=100),
}
_LSQ = {
    "scale_algorithm": AlgorithmOption(str, choices=("max", "mse")),
    "learnable_amax": AlgorithmOption(
        list, choices=(["pre", "post"], ["post", "pre"], ["post"], ["pre"], "post", "pre", [])
    ),
    "tied_amax": _FLAG,
    "quantize_pre_scale": _FLAG,
}

_SCALES_OF: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "cast": (("nvfp4",), "NVFP4"),
        "four_over_six": (("nvfp4",), "NVFP4"),
        "scale_search": (("nvfp4", "mxfp4"), "NVFP4 or MXFP4"),
    }
)
"""Options that concern block scales: the packings that have such scales, and their names."""

METHODS: Mapping[str, Mapping[str, AlgorithmOption]] = MappingProxyType(
    {
        "none": {**_FP4_SCALES, "cast": _FLAG},
        "max": {**_FP4_SCALES, "cast": _FLAG},
        "mse": _FP4_SCALES,
        "percentile": {"percentile": AlgorithmOption(float, maximum=100.0, excludes_minimum=True)},
        "entropy": {},
        "smoothquant": {
            "alpha": _SHARE,
            "alpha_step": _STEP,
            "robust": _FLAG,
            "clip": _FLAG,
            "fold": _FLAG,
        },
        "awq": {"alpha_step": _STEP, "gptq": _FLAG, "fold": _FLAG, **_GPTQ},
        "svdquant": {
            "rank": AlgorithmOption(int, minimum=1, maximum=4096),
            "alpha_step": _STEP,
        },
        "gptq": _GPTQ,
        "learned_rounding": _LEARNED,
        "lsq": _LSQ,
        "kl_div": {"modelopt": _FLAG},
        "gradient": {"modelopt": _FLAG},
    }
)
"""Methods with their options; `none` needs no data, the last two choose formats."""

SENSITIVITY_METHODS = ("kl_div", "gradient")


def read_algorithm(
    node: Node | None, formats: Mapping[str, RecipeFormat], problems: RecipeProblems
) -> dict[str, Any]:
    """Read the `algorithm` of a recipe in megtool's own dialect.

    The default is `max` if a format needs data, `svdquant` if one has its matrices, `kl_div` if
    formats are chosen, else `none`.
    """
    if node is None:
        return {"method": _default_method(formats.values())}
    if isinstance(node.value, str):
        algorithm: dict[str, Any] = {"method": node.value}
        lines: Mapping[str, int] = {"method": node.line}
    elif isinstance(node.value, dict) and "method" in node.value:
        algorithm, lines = node.plain(), node.keys or {}
    else:
        problems.add(node.line, "algorithm needs a method", "one of " + ", ".join(METHODS))
        return {"method": "none"}
    method = str(algorithm["method"])
    if method not in METHODS:
        problems.add(lines["method"], f"unknown method {method!r}", suggest(method, METHODS))
        return {"method": "none"}
    check_options(method, algorithm, METHODS[method], lines, problems)
    for option, (kinds, numbers) in _SCALES_OF.items():
        packings = [packing_of(f) for f in formats.values() if f.algo]
        if algorithm.get(option) is True and not any(p.startswith(kinds) for p in packings):
            message = f"{option} does nothing: no format has weights in {numbers}"
            problems.add(lines[option], message, "leave it out")
    _check_learned(method, algorithm, lines, formats, problems)
    if method == LSQ:
        check_tied(algorithm, lines.get("tied_amax", lines["method"]), problems)
    if algorithm.get("cast") is True and any(algorithm.get(o) is True for o in _FP4_SCALES):
        problems.add(lines["cast"], "cast leaves no scale to search", "take one of them")
    _check_use(method, formats, lines["method"], problems)
    return algorithm


def _check_learned(
    method: str,
    algorithm: Mapping[str, Any],
    lines: Mapping[str, int],
    formats: Mapping[str, RecipeFormat],
    problems: RecipeProblems,
) -> None:
    """Check that learned rounding on top of another method, and its options, have an effect."""
    if method == "learned_rounding":
        return
    if algorithm.get("learned_rounding") is True:
        if not any(f.algo and chooses_codes(f) for f in formats.values()):
            message = "learned_rounding does nothing: no format has codes to choose"
            problems.add(lines["learned_rounding"], message, "leave it out")
        return
    for option in _DESCENT:
        if option in algorithm and option in METHODS[method]:
            message = f"{option} does nothing without learned_rounding"
            problems.add(lines[option], message, "`learned_rounding: true`, or leave it out")


def check_options(
    method: str,
    options: Mapping[str, Any],
    schema: Mapping[str, AlgorithmOption],
    lines: Mapping[str, int],
    problems: RecipeProblems,
) -> None:
    """Check that every option is known and in its range."""
    for key, value in options.items():
        if key == "method":
            continue
        if key not in schema:
            hint = suggest(key, schema) if schema else "it has none"
            problems.add(lines.get(key, 0), f"unknown option {key!r} of {method}", hint)
        elif not schema[key].accepts(value):
            problems.add(lines.get(key, 0), f"{key} is {value!r}", schema[key].describe())


def _default_method(formats: Iterable[RecipeFormat]) -> str:
    listed = list(formats)
    if any(f.choose for f in listed):
        return "kl_div"
    if any(f.algo and f.number.has_branch for f in listed):
        return "svdquant"
    return "max" if any(_needs_data(f) for f in listed) else "none"


def _needs_data(format: RecipeFormat) -> bool:
    """Whether the format has scales that come from data."""
    if format.kv_algo:
        return not format.constant
    return bool(format.algo) and format.number.calibrates


def is_no_op(method: str, options: Mapping[str, Any], format: RecipeFormat) -> bool:
    """Whether a method has the same result as `max` for a weight format.

    `options` are those of the method; both our method names and ModelOpt's are known.
    """
    number = format.number
    smooths = can_smooth(format, fold=bool(options.get("fold")))
    is_fp4 = packing_of(format).startswith(("nvfp4", "mxfp4"))
    clips = bool(options.get("clip")) or method in ("awq_full", "awq_clip")
    clips |= is_fp4 and any(options.get(o) is True for o in _FP4_SCALES)
    gptq = chooses_codes(format)
    if method == "svdquant":
        return not number.has_branch
    if method == LSQ:
        return not has_learnable_scales(format)
    if method == "none":
        return number.calibrates
    if method in SENSITIVITY_METHODS:
        return True
    if method in ("percentile", "entropy"):
        return not number.calibrates
    if method in ("gptq", "learned_rounding"):
        return not (clips or gptq)
    if method == "smoothquant":
        return not (smooths or (clips and number.calibrates))
    if method in SMOOTHING_METHODS:
        chosen = bool(options.get("gptq")) or bool(options.get("learned_rounding"))
        return not (smooths or clips or (chosen and gptq))
    return False


def _check_use(
    method: str, formats: Mapping[str, RecipeFormat], line: int, problems: RecipeProblems
) -> None:
    """Check that the recipe's method has an effect on some format."""
    listed = list(formats.values())
    chooses = any(f.choose for f in listed)
    if method in SENSITIVITY_METHODS and listed and not chooses:
        problems.add(
            line,
            f"{method} is for formats that choose, and there are none",
            "max, or another method",
        )
    only_caches = bool(listed) and all(f.kv_algo for f in listed)
    if only_caches and method not in ("max", "none", *SENSITIVITY_METHODS):
        message = f"{method} does nothing to a KV cache, and there are no other formats"
        problems.add(line, message, "max")


def check_methods(
    algorithm: Mapping[str, Any], formats: Mapping[str, RecipeFormat], problems: RecipeProblems
) -> None:
    """Check that every format is affected by its method, its own or the recipe's."""
    overall = str(algorithm.get("method", "none"))
    for format in formats.values():
        method = format.method or overall
        message = f"{method} does nothing to format {format.name!r}"
        if format.choose:
            if format.method and format.method not in SENSITIVITY_METHODS:
                hint = "kl_div or gradient; formats that it chooses from have their own"
                problems.add(format.line, f"{method} does not choose formats", hint)
        elif format.kv_algo:
            if method == "none" and not format.constant:
                problems.add(
                    format.line,
                    f"format {format.name!r} is scaled by data, and algorithm none takes none",
                    "`algorithm: max`, or constant: true",
                )
            elif format.method and format.method not in ("max", "none"):
                problems.add(format.line, f"{message}, a KV cache", "it has max, or constant: true")
        elif format.algo and format.number.has_branch and method != "svdquant":
            problems.add(
                format.line,
                f"{method} does not compute the low-rank matrices of format {format.name!r} "
                f"({format.algo})",
                "give it `algorithm: svdquant`",
            )
        elif format.algo and not (not format.method and overall in SENSITIVITY_METHODS):
            options = algorithm if method == overall else {}
            if is_no_op(method, options, format):
                problems.add(
                    format.line, f"{message} ({format.algo})", _suggest_method(method, format)
                )


def _suggest_method(method: str, format: RecipeFormat) -> str:
    if method == "none":
        return "its inputs' scale comes from data: `algorithm: max`"
    return (
        "give it `algorithm: max`" if _needs_data(format) else "give it `algorithm: none`, or max"
    )
