"""Needs: what must be seen of inputs and weights before a module is settled; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.quant.algorithms.algorithm_config import method_of
from megtool.quant.qparams import INPUTS, packing_of
from megtool.quant.recipes.formats import Format
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a decision takes: any statistics, the Gram matrix (an `even` one) or sample among them,
    and whether later layers should see what rounding made of this one."""

    data: bool = False
    gram: bool = False
    even: bool = False
    sample: bool = False
    sequential: bool = False


def needs(recipe: Recipe, decision: Decision) -> Needs:
    """What must be seen of the inputs of a module before it is settled.

    Raises:
        RecipeError: its algorithm is not known here.
    """
    format = decision.format
    if format is None or format.choose:
        return Needs()
    if format.kv_algo:
        return Needs(data=not format.constant)
    config = method_of(recipe, format)
    searches = config.columns == "search" and format.number.smooths
    smooths = config.columns == "smooth" and format.number.smooths
    rounds = format.algo in INPUTS
    by_output = (config.clips_weights or config.gptq) and not config.mse
    gram = by_output or (searches and not rounds)
    sample = rounds and (searches or config.clips_inputs or (smooths and config.alpha is None))
    return Needs(
        data=(format.number.calibrates and not format.input_amax) or gram or sample or smooths,
        gram=gram,
        even=gram and config.even,
        sample=sample,
        sequential=config.gptq and format.number.scaling in ("group", "channel"),
    )


def is_two_level(found: Format) -> bool:
    """Scales have a scale of their own, which modules that engines fuse share."""
    return packing_of(found).startswith("nvfp4") or found.algo == "W4A8_AWQ"


def is_plain(recipe: Recipe, decision: Decision) -> bool:
    """Nothing at all is looked at: the format says what becomes of the weight, row by row.

    Raises:
        RecipeError: its algorithm is not known here.
    """
    format = decision.format
    if format is None:
        return True
    if format.choose or format.kv_algo or is_two_level(format):
        return False
    return not needs(recipe, decision).data and not method_of(recipe, format).mse
