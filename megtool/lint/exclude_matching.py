"""Matching: which modules each engine leaves alone, by the lists that config files give.

Engines look at the modules they build, where projections are fused: a list names the parts, and
every engine puts the two together in its own way. Patterns that exclude a module for one engine do
not for another, and some exclude more than they say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from megtool.lint import citations as at
from megtool.lint.context import shards_of
from megtool.quant.recipes.compressed_targets import EXPRESSION, means

Patterns = Sequence[str]


class MixedError(Exception):
    """The parts of a fused projection have different answers, which engines refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """How an engine, from a version on, takes a list: whether a unit is left alone by it.

    `algos` are what the line is for, all where there are none; `words` say it for people.
    """

    engine: str
    since: str
    form: str
    excludes: Callable[[str, Patterns], bool]
    words: str
    source: str
    algos: tuple[str, ...] = ()


def _exactly(unit: str, patterns: Patterns) -> bool:
    """The name, or those of all parts of a fused projection, stand in the list."""
    parts = shards_of(unit)
    if not parts:
        return unit in patterns
    found = [part in patterns for part in parts]
    if any(found) != all(found):
        raise MixedError
    return all(found)


def _vllm(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        if any("experts" in p and unit in p for p in patterns):
            return True
    elif _exactly(unit, patterns):
        return True
    if any(p != unit and p in unit for p in patterns):
        return True
    return any(fnmatchcase(unit, p) for p in patterns)


def _vllm_fp8(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        return any("experts" in p and unit in p for p in patterns)
    return _exactly(unit, patterns) or any(p in unit for p in patterns)


def _as_regex(pattern: str) -> str:
    return pattern.replace(".", r"\.").replace("*", ".*")


def _full(expression: str, name: str) -> bool:
    try:
        return re.fullmatch(expression, name) is not None
    except re.error:
        return False


def _sglang(unit: str, patterns: Patterns) -> bool:
    if not unit.endswith(".experts") and _exactly(unit, patterns):
        return True
    names = (unit, *unit.split("."))
    return any(_full(_as_regex(p), name) for p in patterns for name in names)


def _sglang_05(unit: str, patterns: Patterns) -> bool:
    if unit.endswith(".experts"):
        return False
    return unit in patterns or any(_full(_as_regex(p), unit) for p in patterns)


def _sglang_substring(unit: str, patterns: Patterns) -> bool:
    return any(p in unit for p in patterns)


def _candidates(unit: str) -> tuple[str, ...]:
    return (unit, *shards_of(unit))


@lru_cache(maxsize=64)
def _sorted_out(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Plain names, which are looked up, and patterns, which have to be tried one by one."""
    wild = tuple(p for p in patterns if p.startswith(EXPRESSION) or any(c in p for c in "*?["))
    return frozenset(patterns) - frozenset(wild), wild


def _trtllm_1(unit: str, patterns: Patterns) -> bool:
    plain, wild = _sorted_out(tuple(patterns))
    names = _candidates(unit)
    return any(n in plain for n in names) or any(fnmatchcase(n, p) for n in names for p in wild)


def _trtllm(unit: str, patterns: Patterns) -> bool:
    plain, wild = _sorted_out(tuple(patterns))
    for name in _candidates(unit):
        while True:
            if name in plain or any(_one(p, name) for p in wild):
                return True
            if "." not in name:
                break
            name = name.rpartition(".")[0]
    return False


def _one(pattern: str, name: str) -> bool:
    if pattern.startswith(EXPRESSION):
        return _full(pattern.removeprefix(EXPRESSION), name)
    if fnmatchcase(name, pattern):
        return True
    return pattern.endswith(".*") and fnmatchcase(name, pattern[:-2])


def _trtllm_fp8(unit: str, patterns: Patterns) -> bool:
    return _trtllm(unit, [*patterns, "*kv_b_proj*", "*k_b_proj*", "*eh_proj"])


def _compressed(unit: str, patterns: Patterns) -> bool:
    names = shards_of(unit)
    if unit.endswith(".experts"):
        names = tuple(f"{unit}.0.{last}" for last in ("gate_proj", "up_proj", "down_proj"))
        if not any(means(p, n) for n in names for p in patterns):
            names = tuple(f"{unit}.0.{last}" for last in ("w1", "w2", "w3"))
    if unit in patterns or not names:
        return any(means(p, unit) for p in patterns)
    found = [any(means(p, n) for p in patterns) for n in names]
    if any(found) != all(found):
        raise MixedError
    return all(found)


MATCHERS = (
    Matcher(
        engine="vllm",
        since="0.9.0",
        form="modelopt",
        excludes=_vllm,
        words="names (of all parts of a fused module), substrings and globs",
        source=at.VLLM_MODELOPT,
    ),
    Matcher(
        engine="vllm",
        since="0.9.0",
        form="fp8",
        excludes=_vllm_fp8,
        words="names, of all parts of a fused module",
        source=at.VLLM_SKIPPED,
    ),
    Matcher(
        engine="vllm",
        since="0.9.0",
        form="compressed-tensors",
        excludes=_compressed,
        words="names, or re: and a pattern for the beginning of a name",
        source=at.VLLM_MATCHING,
    ),
    Matcher(
        engine="sglang",
        since="0.5",
        form="modelopt",
        algos=("FP8",),
        excludes=_sglang_substring,
        words="substrings of the fused module's name",
        source=at.SGLANG_MODELOPT_2025,
    ),
    Matcher(
        engine="sglang",
        since="0.5",
        form="modelopt",
        excludes=_sglang_05,
        words="the fused module's name, or a glob for the whole of it; experts never",
        source=at.SGLANG_MODELOPT,
    ),
    Matcher(
        engine="sglang",
        since="main",
        form="modelopt",
        excludes=_sglang,
        words="names (of all parts of a fused module), globs for a whole name or a part of it",
        source=at.SGLANG_MODELOPT_MAIN,
    ),
    Matcher(
        engine="sglang",
        since="0.5",
        form="fp8",
        excludes=_vllm_fp8,
        words="names, of all parts of a fused module",
        source=at.SGLANG_SKIPPED,
    ),
    Matcher(
        engine="sglang",
        since="0.5",
        form="compressed-tensors",
        excludes=_compressed,
        words="names, or re: and a pattern for the beginning of a name",
        source=at.SGLANG_COMPRESSED,
    ),
    Matcher(
        engine="trtllm",
        since="1.0.0",
        form="modelopt",
        excludes=_trtllm_1,
        words="globs for the whole name of the module or of one of its parts",
        source=at.TRTLLM_EXCLUDED_1,
    ),
    *(
        Matcher(
            engine="trtllm",
            since="main",
            form=form,
            excludes=excludes,
            words="globs and re: patterns for the whole name of the module, of one of its parts, "
            "or of what holds it",
            source=at.TRTLLM_EXCLUDED,
        )
        for form, excludes in (
            ("modelopt", _trtllm),
            ("compressed-tensors", _trtllm),
        )
    ),
    Matcher(
        engine="trtllm",
        since="1.0.0",
        form="fp8",
        excludes=_trtllm_fp8,
        words="globs for the whole name, kv_b_proj always",
        source=at.TRTLLM_CONFIG,
    ),
)
