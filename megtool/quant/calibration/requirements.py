"""The data that calibration has to collect for a module; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.quant.algorithms.algorithm_config import resolve_algorithm
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequirements:
    """Data that a module's quantization parameters depend on.

    `data`: any activation statistics; `gram`: the Gram matrix of inputs (`normalized_gram`: of
    token-normalized inputs); `sample`: sampled input rows; `sequential`: later layers see the
    outputs of this layer after quantization. `learned`: its rounding is learned from the outputs of
    the layer, quantized and not.
    """

    data: bool = False
    gram: bool = False
    normalized_gram: bool = False
    sample: bool = False
    sequential: bool = False
    learned: bool = False


def derive_requirements(recipe: Recipe, decision: Decision) -> CalibrationRequirements:
    """Derive what has to be collected for a module.

    Raises:
        RecipeError: the algorithm is not supported.
    """
    format = decision.format
    if format is None or format.choose:
        return CalibrationRequirements()
    if format.kv_algo:
        return CalibrationRequirements(data=not format.constant)
    config = resolve_algorithm(recipe, format)
    searches = config.smoothing == "awq" and config.smooths(format)
    smooths = config.smoothing == "smoothquant" and config.smooths(format)
    rounds = format.algo in INPUT_PACKINGS
    by_output = (config.clips_weights or config.gptq) and not config.mse
    gram = by_output or (searches and not rounds)
    clips = config.clips_inputs and format.number.calibrates
    sample = rounds and (searches or clips or (smooths and config.alpha is None))
    sample |= config.compensates_inputs(format)
    learned = config.learns_rounding(format)
    return CalibrationRequirements(
        data=(format.number.calibrates and not format.input_amax)
        or gram
        or sample
        or smooths
        or learned,
        gram=gram,
        normalized_gram=gram and config.normalize_tokens,
        sample=sample,
        sequential=(config.gptq and format.number.scaling in ("group", "channel")) or learned,
        learned=learned,
    )


def is_two_level(format: RecipeFormat) -> bool:
    """Block scales have a global scale, which modules that engines fuse share."""
    return packing_of(format).startswith("nvfp4") or format.algo == "W4A8_AWQ"


def is_format_only(recipe: Recipe, decision: Decision) -> bool:
    """Neither data nor other weights are needed: rows are quantized by the format alone.

    Raises:
        RecipeError: the algorithm is not supported.
    """
    format = decision.format
    if format is None:
        return True
    if format.choose or format.kv_algo or is_two_level(format):
        return False
    return (
        not derive_requirements(recipe, decision).data and not resolve_algorithm(recipe, format).mse
    )
