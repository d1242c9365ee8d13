"""Method: what a recipe asks to be searched for a weight, in one vocabulary for every dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megtool.errors import RecipeError
from megtool.quant.recipes.algorithm import METHODS
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.recipe import Recipe

InputObserver = Literal["max", "percentile", "mse", "entropy"]
Smoothing = Literal["none", "smooth", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """How columns, scales and codes are chosen.

    `columns`: none, by SmoothQuant's formula, or searched as AWQ does. `alpha` is the share of the
    inputs in SmoothQuant's factors (None: searched). `alpha_step` is that of the search. `robust`
    takes the root mean squares of inputs for them, not the largest (see `smooth.measures`). `clip`:
    how much of the largest magnitudes is cut off is searched too, of weights (not with SmoothQuant)
    and of inputs, by the error of outputs. `mse` searches it by the weight alone. `gptq`: the
    rounding of each column is made up for by later ones; `damping`, `shrinkage` (see `gptq.damped`)
    and `descending` are its options, and `refinements` is how often scales and codes are then
    improved by turns. `even`: in second moments a token counts by the size of its inputs, not by
    its square. `fold`: columns have factors only where a norm before takes them in. `inputs` says
    how else the scale of inputs is found (`percentile` of it). `exact` does as ModelOpt does, and
    no better.
    """

    smoothing: Smoothing = "none"
    alpha: float | None = None
    alpha_step: float = 0.1
    robust: bool = False
    clip: bool = False
    mse: bool = False
    gptq: bool = False
    damping: float = 0.01
    shrinkage: float = 0.0
    normalize_tokens: bool = False
    desc_act: bool = True
    refinements: int = 2
    fold: bool = False
    input_observer: InputObserver = "max"
    percentile: float = 99.99
    matches_modelopt: bool = False

    @property
    def clips_weights(self) -> bool:
        """Whether the scales of weights are searched by the error of outputs."""
        return self.clip and self.smoothing != "smooth"

    @property
    def clips_inputs(self) -> bool:
        """Whether the scale of inputs is searched by the error of outputs."""
        return self.clip and not self.matches_modelopt

    def without_smoothing(self) -> AlgorithmConfig:
        """The same, but with no factors of columns."""
        return replace(self, columns="none")


_MODELOPT_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "smoothquant": {"columns": "smooth", "alpha": 1.0},
    "awq": {"columns": "search"},
    "awq_lite": {"columns": "search"},
    "awq_full": {"columns": "search", "clip": True},
    "awq_clip": {"clip": True},
    "gptq": {"gptq": True, "descending": False, "refinements": 0},
    "local_hessian": {"clip": True},
    "mse": {"mse": True},
    "max": {},
    "none": {},
    "None": {},
    "kl_div": {},
    "gradient": {},
}
"""ModelOpt's names, with its defaults."""

_MODELOPT_OPTIONS = {"alpha": "alpha", "alpha_step": "alpha_step", "perc_damp": "damping"}


def resolve_algorithm(recipe: Recipe, format: RecipeFormat | None) -> AlgorithmConfig:
    """What is searched for a weight in `format`, by its own algorithm or else the recipe's.

    Raises:
        RecipeError: the recipe is of another dialect and names an algorithm that is not known here.
    """
    name = (format.method if format else "") or recipe.method
    options = dict(recipe.algorithm) if name == recipe.method else {}
    options.pop("method", None)
    if recipe.dialect != "megtool":
        if name not in _MODELOPT_ALGORITHMS:
            raise RecipeError(
                f"algorithm {name!r} of recipe {recipe.name} is not carried out here",
                hint=suggest(name, _MODELOPT_ALGORITHMS),
            )
        translated = {
            _MODELOPT_OPTIONS[k]: v
            for k, v in options.items()
            if k in _MODELOPT_OPTIONS and v is not None
        }
        return AlgorithmConfig(
            **{**_MODELOPT_ALGORITHMS[name], **translated},
            fold=recipe.folds_scales,
            matches_modelopt=True,
        )
    options = {k: v for k, v in options.items() if k in METHODS[name]}
    if name in ("smoothquant", "awq"):
        options["fold"] = recipe.folds_scales
    if name == "smoothquant":
        return AlgorithmConfig(smoothing="smooth", **options)
    if name == "awq":
        return AlgorithmConfig(smoothing="search", **options)
    if name == "gptq":
        return AlgorithmConfig(gptq=True, **options)
    if name == "mse":
        return AlgorithmConfig(mse=True, input_observer="mse")
    if name in ("percentile", "entropy"):
        return AlgorithmConfig(input_observer=name, **options)  # type: ignore[arg-type]
    return AlgorithmConfig()
