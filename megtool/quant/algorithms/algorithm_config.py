"""Configuration of the quantization algorithm of a weight, the same for every recipe dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megtool.errors import RecipeError
from megtool.quant.recipes.algorithm import METHODS
from megtool.quant.recipes.formats import (
    DEFAULT_RANK,
    INPUT_PACKINGS,
    RecipeFormat,
    can_smooth,
    chooses_codes,
)
from megtool.quant.recipes.learned_scales import METHOD as LSQ
from megtool.quant.recipes.learned_scales import first_scales
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.recipe import Recipe

InputObserver = Literal["max", "percentile", "mse", "entropy"]
Smoothing = Literal["none", "smoothquant", "awq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How smoothing scales, quantization scales and codes are chosen.

    Args:
        smoothing: no smoothing scale, SmoothQuant's formula, or AWQ's search.
        alpha: share of the inputs in SmoothQuant's scale (None: searched in steps of `alpha_step`).
        robust: use RMS instead of max of input channels (see `smoothquant.measure_inputs`).
        clip: also search clipping thresholds by output error, of weights (not with SmoothQuant)
            and of inputs.
        mse: search the clipping threshold of weights by the error of the weight alone.
        four_over_six: the search for NVFP4's block scales is whether the largest element becomes 6
            or 4.
        scale_search: the search for FP4's block scales also tries larger ones than the amax needs.
        cast: weights are MXFP4, and keep their values in NVFP4 (see `mxfp4_cast`).
        gptq: later columns compensate for the rounding of earlier ones, with the options
            `damping`, `shrinkage` (see `gptq.damp_gram`), `desc_act`, and `refinements`, the number
            of alternating passes over codes and scales.
        compensate_inputs: with `gptq`, weights also make up for the rounding of inputs.
        learned_rounding: codes and scales are then learned from the output error of the layer, in
            `steps` of `batch_size` rows, the first by `learning_rate` (0: 1 / `steps`; see
            `algorithms.learned_rounding`).
        normalize_tokens: divide each token's contribution to the second moments by the norm of its
            input.
        rank: of the matrices that SVDQuant takes out of weights before they are rounded (see
            `algorithms.svdquant`); 0: it does not.
        fold: use a smoothing scale only where the preceding norm can absorb it.
        input_observer: how the amax of inputs is computed (`percentile` is an option of it).
        matches_modelopt: search exactly what ModelOpt searches.
    """

    smoothing: Smoothing = "none"
    alpha: float | None = None
    alpha_step: float = 0.1
    robust: bool = False
    clip: bool = False
    mse: bool = False
    four_over_six: bool = False
    scale_search: bool = False
    cast: bool = False
    gptq: bool = False
    damping: float = 0.01
    shrinkage: float = 0.0
    compensate_inputs: bool = False
    learned_rounding: bool = False
    steps: int = 200
    batch_size: int = 8
    learning_rate: float = 0.0
    normalize_tokens: bool = False
    desc_act: bool = True
    refinements: int = 2
    rank: int = 0
    fold: bool = False
    input_observer: InputObserver = "max"
    percentile: float = 99.99
    matches_modelopt: bool = False

    @property
    def clips_weights(self) -> bool:
        """Whether clipping thresholds of weights are searched by output error."""
        searches = self.clip or self.four_over_six or self.scale_search
        return searches and self.smoothing != "smoothquant"

    @property
    def clips_inputs(self) -> bool:
        """Whether the clipping threshold of inputs is searched by output error."""
        return self.clip and not self.matches_modelopt

    def smooths(self, format: RecipeFormat) -> bool:
        """Whether inputs of `format` get a smoothing scale."""
        return self.smoothing != "none" and can_smooth(format, fold=self.fold)

    def compensates_inputs(self, format: RecipeFormat) -> bool:
        """Whether weights of `format` make up for the rounding of inputs."""
        return self.gptq and self.compensate_inputs and format.algo in INPUT_PACKINGS

    def learns_rounding(self, format: RecipeFormat) -> bool:
        """Whether the rounding of weights in `format` is learned."""
        return self.learned_rounding and chooses_codes(format)

    def without_smoothing(self) -> AlgorithmConfig:
        """The same configuration without a smoothing scale."""
        return replace(self, smoothing="none")


_MODELOPT_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "smoothquant": {"smoothing": "smoothquant", "alpha": 1.0},
    "awq": {"smoothing": "awq"},
    "awq_lite": {"smoothing": "awq"},
    "awq_full": {"smoothing": "awq", "clip": True},
    "awq_clip": {"clip": True},
    "svdquant": {"smoothing": "awq", "rank": DEFAULT_RANK},
    "gptq": {"gptq": True, "desc_act": False, "refinements": 0},
    "nvfp4_act_headroom": {},
    "local_hessian": {"clip": True},
    "mse": {"mse": True},
    "max": {},
    "none": {},
    "None": {},
    "kl_div": {},
    "gradient": {},
}
"""ModelOpt's algorithm names with their defaults."""

_MODELOPT_OPTIONS = {
    "alpha": "alpha",
    "alpha_step": "alpha_step",
    "perc_damp": "damping",
    "lowrank": "rank",
}


def require_own_solver(recipe: Recipe) -> None:
    """Refuse algorithms that ModelOpt alone has.

    Raises:
        RecipeError: the recipe's is one.
    """
    if recipe.method == "nvfp4_act_headroom":
        raise RecipeError(
            f"recipe {recipe.name} asks for {recipe.method}, which megtool itself does not have",
            hint="quantize --backend modelopt runs it; or max",
        )


def resolve_algorithm(recipe: Recipe, format: RecipeFormat | None) -> AlgorithmConfig:
    """Resolve the algorithm of a weight in `format`: that of the format, else that of the recipe.

    Raises:
        RecipeError: the recipe is of another dialect and its algorithm is not supported.
    """
    name = (format.method if format else "") or recipe.method
    options = dict(recipe.algorithm) if name == recipe.method else {}
    if name == LSQ:  # until a model trains, its scales are those that training begins with
        options = first_scales(options)
        name = str(options["method"])
    options.pop("method", None)
    if recipe.dialect != "megtool":
        if name not in _MODELOPT_ALGORITHMS:
            raise RecipeError(
                f"algorithm {name!r} of recipe {recipe.name} is not supported",
                hint=suggest(name, _MODELOPT_ALGORITHMS),
            )
        translated = {
            _MODELOPT_OPTIONS[k]: v
            for k, v in options.items()
            if k in _MODELOPT_OPTIONS and v is not None
        }
        if format is not None and format.block_scales == "four_over_six":
            translated["four_over_six"] = True
        return AlgorithmConfig(
            **{**_MODELOPT_ALGORITHMS[name], **translated},
            fold=recipe.folds_scales,
            matches_modelopt=True,
        )
    options = {k: v for k, v in options.items() if k in METHODS[name]}
    if name in ("smoothquant", "awq"):
        options["fold"] = recipe.folds_scales
    if name == "smoothquant":
        return AlgorithmConfig(smoothing="smoothquant", **options)
    if name == "awq":
        return AlgorithmConfig(smoothing="awq", **options)
    if name == "svdquant":
        return AlgorithmConfig(smoothing="awq", **{"rank": DEFAULT_RANK, **options})
    if name == "gptq":
        return AlgorithmConfig(gptq=True, **options)
    if name == "learned_rounding":
        return AlgorithmConfig(learned_rounding=True, **options)
    if name == "mse":
        return AlgorithmConfig(mse=True, input_observer="mse", **options)
    if name in ("none", "max"):
        searches = bool(options.get("four_over_six") or options.get("scale_search"))
        return AlgorithmConfig(mse=searches, **options)
    if name in ("percentile", "entropy"):
        return AlgorithmConfig(input_observer=name, **options)  # type: ignore[arg-type]
    return AlgorithmConfig()
