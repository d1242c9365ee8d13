"""Settle: from what was seen of inputs to what becomes of each weight, cache and norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.config import ModelConfig
from megtool.errors import CalibrationError
from megtool.quant.algorithms.method import Method, method_of
from megtool.quant.formats import Format
from megtool.quant.match import Decision
from megtool.quant.points import Point
from megtool.quant.recipe import Recipe
from megtool.quant.statistics import Statistics
from megtool.quant.treatment import INPUTS, Cache, Settlement, Treatment

Weights = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a decision takes: any statistics, the Gram matrix or sample among them, and whether
    later layers should see what rounding made of this one."""

    data: bool = False
    gram: bool = False
    sample: bool = False
    sequential: bool = False


def needs(recipe: Recipe, decision: Decision) -> Needs:
    """What must be seen of the inputs of a module before it is settled."""
    found = decision.format
    if found is None or found.choose:
        return Needs()
    if found.kv_algo:
        return Needs(data=not found.constant)
    method = method_of(recipe, found)
    searched = method.columns != "none" or method.clip or method.gptq
    rounded = found.algo in INPUTS
    return Needs(
        data=found.number.calibrates or searched,
        gram=searched,
        sample=searched and rounded,
        sequential=method.gptq,
    )


def settle(
    points: Iterable[Point],
    statistics: Mapping[str, Statistics],
    decisions: Mapping[str, Decision],
    recipe: Recipe,
    weights: Weights,
    *,
    config: ModelConfig,
    progress: Callable[[str], None] | None = None,
) -> Settlement:
    """Settle all modules of `points` for which `decisions` (by module) have a format.

    `statistics` are by the points' names. `weights` gives a canonical module's weight as float32
    `[out, in]`; it is asked only where an algorithm looks at weights.

    Raises:
        CalibrationError: a decision needs data and there is none at all.
    """
    done = Settlement()
    for point in points:
        seen = statistics.get(point.name)
        if point.what == "kv_cache":
            _settle_cache(done, point, seen, decisions, config)
        else:
            _settle_inputs(done, point, seen, decisions, recipe, weights)
        if progress:
            progress(point.name)
    return done


def _settle_inputs(
    done: Settlement,
    point: Point,
    seen: Statistics | None,
    decisions: Mapping[str, Decision],
    recipe: Recipe,
    weights: Weights,
) -> None:
    formats = {
        m: f for m in point.modules if m in decisions and (f := decisions[m].format) is not None
    }
    calibrated = [f for f in formats.values() if f.number.calibrates]
    amax = 0.0
    if calibrated:
        if seen is None or not seen.num_tokens:
            raise CalibrationError(f"nothing was seen at {point.name}")
        amax = float(seen.amax.max()) or 1.0
    for module, found in formats.items():
        done.treatments[module] = Treatment(
            module=module, format=found, input_amax=amax if found.number.calibrates else 0.0
        )


def _settle_cache(
    done: Settlement,
    point: Point,
    seen: Statistics | None,
    decisions: Mapping[str, Decision],
    config: ModelConfig,
) -> None:
    for module in point.modules:
        found = decisions[module].format if module in decisions else None
        if found is None:
            continue
        key = value = LARGEST_CACHE[found.kv_algo]
        if not found.constant:
            if seen is None or not seen.num_tokens:
                raise CalibrationError(f"nothing was seen at {point.name}")
            half = point.width // 2
            latent = config.latent is not None if hasattr(config, "latent") else False
            key = float(seen.amax.max() if latent else seen.amax[:half].max()) or key
            value = float(seen.amax.max() if latent else seen.amax[half:].max()) or value
        done.caches[module] = Cache(module=module, format=found, key_amax=key, value_amax=value)


LARGEST_CACHE = {"FP8": 448.0, "NVFP4": 448.0 * 6.0}
"""The amax under which a KV cache's scale is 1."""
