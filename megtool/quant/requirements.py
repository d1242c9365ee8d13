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
    found = decision.format
    if found is None or found.choose:
        return Needs()
    if found.kv_algo:
        return Needs(data=not found.constant)
    method = method_of(recipe, found)
    searches = method.columns == "search" and found.number.smooths
    smooths = method.columns == "smooth" and found.number.smooths
    rounds = found.algo in INPUTS
    by_output = (method.clips_weights or method.gptq) and not method.mse
    gram = by_output or (searches and not rounds)
    sample = rounds and (searches or method.clips_inputs or (smooths and method.alpha is None))
    return Needs(
        data=(found.number.calibrates and not found.input_amax) or gram or sample or smooths,
        gram=gram,
        even=gram and method.even,
        sample=sample,
        sequential=method.gptq and found.number.scaling in ("group", "channel"),
    )


def is_two_level(found: Format) -> bool:
    """Scales have a scale of their own, which modules that engines fuse share."""
    return packing_of(found).startswith("nvfp4") or found.algo == "W4A8_AWQ"


def is_plain(recipe: Recipe, decision: Decision) -> bool:
    """Nothing at all is looked at: the format says what becomes of the weight, row by row.

    Raises:
        RecipeError: its algorithm is not known here.
    """
    found = decision.format
    if found is None:
        return True
    if found.choose or found.kv_algo or is_two_level(found):
        return False
    return not needs(recipe, decision).data and not method_of(recipe, found).mse
