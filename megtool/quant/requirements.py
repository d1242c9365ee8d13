"""Needs: what must be seen of inputs and weights before a module is settled; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.quant.algorithms.algorithm_config import resolve_algorithm
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequirements:
    """What a decision takes: any statistics, the Gram matrix (an `even` one) or sample among them,
    and whether later layers should see what rounding made of this one."""

    data: bool = False
    gram: bool = False
    normalized_gram: bool = False
    sample: bool = False
    sequential: bool = False


def derive_requirements(recipe: Recipe, decision: Decision) -> CalibrationRequirements:
    """What must be seen of the inputs of a module before it is settled.

    Raises:
        RecipeError: its algorithm is not known here.
    """
    format = decision.format
    if format is None or format.choose:
        return CalibrationRequirements()
    if format.kv_algo:
        return CalibrationRequirements(data=not format.constant)
    config = resolve_algorithm(recipe, format)
    searches = config.smoothing == "search" and format.number.smooths
    smooths = config.smoothing == "smooth" and format.number.smooths
    rounds = format.algo in INPUT_PACKINGS
    by_output = (config.clips_weights or config.gptq) and not config.mse
    gram = by_output or (searches and not rounds)
    sample = rounds and (searches or config.clips_inputs or (smooths and config.alpha is None))
    return CalibrationRequirements(
        data=(format.number.calibrates and not format.input_amax) or gram or sample or smooths,
        gram=gram,
        normalized_gram=gram and config.normalize_tokens,
        sample=sample,
        sequential=config.gptq and format.number.scaling in ("group", "channel"),
    )


def is_two_level(format: RecipeFormat) -> bool:
    """Scales have a scale of their own, which modules that engines fuse share."""
    return packing_of(format).startswith("nvfp4") or format.algo == "W4A8_AWQ"


def is_format_only(recipe: Recipe, decision: Decision) -> bool:
    """Nothing at all is looked at: the format says what becomes of the weight, row by row.

    Raises:
        RecipeError: its algorithm is not known here.
    """
    format = decision.format
    if format is None:
        return True
    if format.choose or format.kv_algo or is_two_level(format):
        return False
    return (
        not derive_requirements(recipe, decision).data and not resolve_algorithm(recipe, format).mse
    )
