"""Algorithm: the methods of calibration, what their options may be, and where each does nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megtool.quant.qparams import packing_of
from megtool.quant.recipes.formats import SMOOTHING, Format
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import nearest
from megtool.quant.recipes.rules import Problems


@dataclass(frozen=True, slots=True)
class Option:
    """What an option of a method may be: a `kind`, and of numbers a range with both ends, the
    lower one left out with `above`."""

    kind: type
    least: float = 0.0
    most: float = 1.0
    above: bool = False

    def takes(self, value: Any) -> bool:
        """The value is of the kind and in the range; NaN and infinities never are."""
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        types = int if self.kind is int else int | float
        if not isinstance(value, types) or not math.isfinite(value):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def words(self) -> str:
        """The range for people."""
        if self.kind is bool:
            return "true or false"
        kind = "a whole number" if self.kind is int else "a number"
        low = f"above {self.least:g}" if self.above else f"from {self.least:g}"
        return f"{kind} {low} {'up ' if self.above else ''}to {self.most:g}"


_FLAG = Option(bool)
_SHARE = Option(float)
_STEP = Option(float, least=0.001)
_GPTQ = {
    "damping": Option(float, most=100.0),
    "shrinkage": _SHARE,
    "even": _FLAG,
    "descending": _FLAG,
    "clip": _FLAG,
    "refinements": Option(int, most=100),
}

METHODS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "none": {},
        "max": {},
        "mse": {},
        "percentile": {"percentile": Option(float, most=100.0, above=True)},
        "entropy": {},
        "smoothquant": {
            "alpha": _SHARE,
            "alpha_step": _STEP,
            "robust": _FLAG,
            "clip": _FLAG,
            "fold": _FLAG,
        },
        "awq": {"alpha_step": _STEP, "gptq": _FLAG, "fold": _FLAG, **_GPTQ},
        "gptq": _GPTQ,
        "kl_div": {},
        "gradient": {},
    }
)
"""Methods with the options each has; `none` needs no data, the last two are for choices."""

CHOOSING = ("kl_div", "gradient")


def read_algorithm(
    node: Node | None, formats: Mapping[str, Format], problems: Problems
) -> dict[str, Any]:
    """The `algorithm` of a recipe with these formats, in megtool's own dialect.

    Where it says nothing, it is the least that its formats ask for.
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
        problems.add(lines["method"], f"unknown method {method!r}", nearest(method, METHODS))
        return {"method": "none"}
    check_options(method, algorithm, METHODS[method], lines, problems)
    _check_use(method, formats, lines["method"], problems)
    return algorithm


def check_options(
    method: str,
    given: Mapping[str, Any],
    known: Mapping[str, Option],
    lines: Mapping[str, int],
    problems: Problems,
) -> None:
    """Every option is known, and in its range."""
    for key, value in given.items():
        if key == "method":
            continue
        if key not in known:
            hint = nearest(key, known) if known else "it has none"
            problems.add(lines.get(key, 0), f"unknown option {key!r} of {method}", hint)
        elif not known[key].takes(value):
            problems.add(lines.get(key, 0), f"{key} is {value!r}", known[key].words())


def _default_method(formats: Iterable[Format]) -> str:
    listed = list(formats)
    if any(f.choose for f in listed):
        return "kl_div"
    return "max" if any(_needs_data(f) for f in listed) else "none"


def _needs_data(format: Format) -> bool:
    """The format has scales that come from data."""
    if format.kv_algo:
        return not format.constant
    return bool(format.algo) and format.number.calibrates


def idle(method: str, options: Mapping[str, Any], found: Format) -> bool:
    """Whether a method does nothing to a weight format that `max` would not do too.

    `options` are those of the method. The names are ours and ModelOpt's.
    """
    number = found.number
    clips = bool(options.get("clip")) or method in ("awq_full", "awq_clip")
    gptq = packing_of(found).startswith("int")
    if method == "none":
        return number.calibrates
    if method in CHOOSING:
        return True
    if method in ("percentile", "entropy"):
        return not number.calibrates
    if method == "gptq":
        return not (clips or gptq)
    if method == "smoothquant":
        return not (number.smooths or (clips and number.calibrates))
    if method in SMOOTHING:
        return not (number.smooths or clips or (bool(options.get("gptq")) and gptq))
    return False


def _check_use(method: str, formats: Mapping[str, Format], line: int, problems: Problems) -> None:
    """The recipe's method is of use to some format."""
    listed = list(formats.values())
    chooses = any(f.choose for f in listed)
    if method in CHOOSING and listed and not chooses:
        problems.add(
            line,
            f"{method} is for formats that choose, and there are none",
            "max, or another method",
        )
    only_caches = bool(listed) and all(f.kv_algo for f in listed)
    if only_caches and method not in ("max", "none", *CHOOSING):
        message = f"{method} does nothing to a KV cache, and there are no other formats"
        problems.add(line, message, "max")


def check_methods(
    algorithm: Mapping[str, Any], formats: Mapping[str, Format], problems: Problems
) -> None:
    """Every format is one that its method, its own or the recipe's, does something to."""
    overall = str(algorithm.get("method", "none"))
    for format in formats.values():
        method = format.method or overall
        message = f"{method} does nothing to format {format.name!r}"
        if format.choose:
            if format.method and format.method not in CHOOSING:
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
        elif format.algo and not (not format.method and overall in CHOOSING):
            options = algorithm if method == overall else {}
            if idle(method, options, format):
                problems.add(format.line, f"{message} ({format.algo})", _suggest_method(method, format))


def _suggest_method(method: str, format: Format) -> str:
    if method == "none":
        return "its inputs' scale comes from data: `algorithm: max`"
    return "give it `algorithm: max`" if _needs_data(format) else "give it `algorithm: none`, or max"
