"""Which modules an engine leaves unquantized, by the lists in the config files.

Engines match the modules that they build, in which projections are fused, while a list names the
parts; every engine combines the two differently. A pattern that excludes a module for one engine
may not do so for another, and some patterns exclude more than they say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from megtool.lint.context import parts_of
from megtool.process.patterns import compile_pattern
from megtool.quant.recipes.compressed_arguments import EXPRESSION, means

Patterns = Sequence[str]


class PartlyExcludedError(Exception):
    """A list excludes some parts of a fused projection, which engines refuse."""


def _all_or_none(matches: Sequence[bool]) -> bool:
    if any(matches) != all(matches):
        raise PartlyExcludedError
    return all(matches)


def _match_exactly(unit: str, patterns: Patterns) -> bool:
    """The name, or those of all parts of a fused projection, are in the list."""
    parts = parts_of(unit)
    return _all_or_none([part in patterns for part in parts]) if parts else unit in patterns


def _match_vllm_modelopt(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        if any("experts" in p and unit in p for p in patterns):
            return True
    elif _match_exactly(unit, patterns):
        return True
    if any(p != unit and p in unit for p in patterns):
        return True
    return any(fnmatchcase(unit, p) for p in patterns)


def _match_vllm_fp8(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        return any("experts" in p and unit in p for p in patterns)
    return _match_exactly(unit, patterns) or any(p in unit for p in patterns)


def _glob_to_regex(pattern: str) -> str:
    return pattern.replace(".", r"\.").replace("*", ".*")


def _full_match(expression: str, name: str) -> bool:
    try:
        return compile_pattern(expression).fullmatch(name) is not None
    except re.error:
        return False


def _match_sglang_modelopt(unit: str, patterns: Patterns) -> bool:
    if not unit.endswith(".experts") and _match_exactly(unit, patterns):
        return True
    names = (unit, *unit.split("."))
    return any(_full_match(_glob_to_regex(p), name) for p in patterns for name in names)


def _match_sglang_0_5(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        return False
    return unit in patterns or any(_full_match(_glob_to_regex(p), unit) for p in patterns)


def _match_sglang_substring(unit: str, patterns: Patterns) -> bool:
    return any(p in unit for p in patterns)


@lru_cache(maxsize=64)
def _split_patterns(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Plain names, which are looked up, and patterns, which are tried one by one."""
    wild = tuple(p for p in patterns if p.startswith(EXPRESSION) or any(c in p for c in "*?["))
    return frozenset(patterns) - frozenset(wild), wild


def _match_trtllm_1_0(unit: str, patterns: Patterns) -> bool:
    plain, wild = _split_patterns(tuple(patterns))
    names = (unit, *parts_of(unit))
    return any(n in plain for n in names) or any(fnmatchcase(n, p) for n in names for p in wild)


def _match_trtllm_modelopt(unit: str, patterns: Patterns) -> bool:
    plain, wild = _split_patterns(tuple(patterns))
    for name in (unit, *parts_of(unit)):
        while name:
            if name in plain or any(_match_trtllm_pattern(p, name) for p in wild):
                return True
            name = name.rpartition(".")[0]
    return False


def _match_trtllm_pattern(pattern: str, name: str) -> bool:
    if pattern.startswith(EXPRESSION):
        return _full_match(pattern.removeprefix(EXPRESSION), name)
    if fnmatchcase(name, pattern):
        return True
    return pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])


def _match_trtllm_fp8(unit: str, patterns: Patterns) -> bool:
    return _match_trtllm_modelopt(unit, [*patterns, "*kv_b_proj*", "*k_b_proj*", "*eh_proj"])


def _match_compressed(unit: str, patterns: Patterns) -> bool:
    names = parts_of(unit)
    if unit.endswith(".experts"):
        names = tuple(f"{unit}.0.{last}" for last in ("gate_proj", "up_proj", "down_proj"))
        if not any(means(p, n) for n in names for p in patterns):
            names = tuple(f"{unit}.0.{last}" for last in ("w1", "w2", "w3"))
    if unit in patterns or not names:
        return any(means(p, unit) for p in patterns)
    return _all_or_none([any(means(p, n) for p in patterns) for n in names])


MATCHERS: Mapping[str, Callable[[str, Patterns], bool]] = {
    "vllm_modelopt": _match_vllm_modelopt,
    "vllm_fp8": _match_vllm_fp8,
    "sglang_modelopt": _match_sglang_modelopt,
    "sglang_0_5": _match_sglang_0_5,
    "sglang_substring": _match_sglang_substring,
    "trtllm_modelopt": _match_trtllm_modelopt,
    "trtllm_1_0": _match_trtllm_1_0,
    "trtllm_fp8": _match_trtllm_fp8,
    "compressed": _match_compressed,
}
"""Whether a list of patterns excludes a unit, by `ExcludeList.matcher` of `engines.yaml`."""
