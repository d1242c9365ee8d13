"""Transformer Engine's recipes for linear layers in FP8, and their delayed scaling state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.kernels.fp8.cast import amax, scale_from_amax
from megtool.kernels.transformer_engine.library import load
from megtool.kernels.transformer_engine.linear import TeModule, TERegion
from megtool.number_formats.delayed_scaling import KINDS, WEIGHT
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.parallel.process_groups import ProcessGroups

_CLASSES: dict[Recipe | None, str] = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
_PROBES: dict[Recipe | None, str] = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def make_te_recipe(settings: Fp8Config, recipes: Any, *, reduce_amax: bool = True) -> Any:
    """The recipe of `settings` from `recipes`, the module `transformer_engine.common.recipe`.

    `reduce_amax`: the ranks of the region's group reduce amax; for delayed scaling only.
    """
    facts: dict[str, Any] = {"fp8_format": recipes.Format[settings.fp8_format.upper()]}
    if settings.fp8_recipe == "delayed":
        facts |= {
            "margin": settings.fp8_margin,
            "amax_history_len": settings.fp8_amax_history_len,
            "amax_compute_algo": settings.fp8_amax_compute_algo,
            "reduce_amax": reduce_amax,
        }
    return getattr(recipes, _CLASSES[settings.fp8_recipe])(**facts)


def required_multiple(recipe: Recipe | None) -> int:
    """The number that rows and both dims of weights have to be multiples of."""
    return 32 if recipe == "mxfp8" else 16


def require_recipe(recipe: Recipe | None) -> None:
    """Check that the GPU supports a recipe.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: the GPU, or its CUDA version, does not.
    """
    can, reason = getattr(load().pytorch, _PROBES[recipe])(return_reason=True)
    if not can:
        raise UsageError(
            f"Transformer Engine cannot run --fp8-recipe {recipe}: {reason}",
            hint="use another --fp8-recipe, or omit --kernels te",
        )


class TeAmaxHistories:
    """The delayed scaling state of linear layers, which Transformer Engine has and updates: those
    that are `products` of its modules, by number.

    It has the methods of `AmaxHistories`. A step is a pass of a micro batch: it ends in the forward
    pass for inputs and weights, in the backward pass for gradients. Transformer Engine's initial
    scales are 1, with which small weights lose most of their bits; here the initial scales of
    weights come from the weights.
    """

    def __init__(self, products: Sequence[tuple[TeModule, int]], settings: Fp8Config) -> None:
        self._products = products
        self.is_fresh = [True] * len(products)  # scales change in every pass
        with torch.no_grad():
            for module, gemm in products:
                largest = amax(module.weights[gemm])
                scale = scale_from_amax(largest, settings.forward, margin=settings.fp8_margin)
                module.scale("fwd", gemm)[WEIGHT].copy_(scale)

    def end_step(self, groups: ProcessGroups) -> None:
        """Do nothing: every pass has ended its own step."""

    def forget_pass(self) -> None:
        """Drop the amax of a pass without gradients, which must not affect training."""
        for module, gemm in self._products:
            module.history("fwd", gemm)[0].zero_()

    def state(self, module: int) -> dict[str, Tensor]:
        """See `AmaxHistories.state`."""
        (te, gemm), out = self._products[module], {}
        for d in KINDS:
            out[f"scale_{d}"] = te.scale(d, gemm).to("cpu", copy=True)
            out[f"amax_history_{d}"] = te.history(d, gemm).to("cpu", copy=True).contiguous()
        return out

    def load(self, module: int, state: Mapping[str, Tensor]) -> None:
        """See `AmaxHistories.load`."""
        te, gemm = self._products[module]
        for d in KINDS:
            te.scale(d, gemm).copy_(state[f"scale_{d}"])
            te.history(d, gemm).copy_(state[f"amax_history_{d}"])


StageRun = Callable[..., Tensor]


class TeTraining:
    """Linear layers of this rank in Transformer Engine: `products` are products of its modules.

    Every rank makes one at the same time: the ranks of a pipeline stage reduce amax.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
        UsageError: the GPU does not support the recipe.
    """

    def __init__(
        self,
        products: Sequence[tuple[TeModule, int]],
        settings: Fp8Config,
        groups: ProcessGroups,
    ) -> None:
        load()
        require_recipe(settings.fp8_recipe)
        stage = groups.stage()
        recipes = import_module("transformer_engine.common.recipe")
        # An earlier run in this process may have left state with groups that no longer exist.
        import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()
        # Without a group Transformer Engine would use the whole world, with all stages.
        recipe = make_te_recipe(settings, recipes, reduce_amax=stage.size > 1)
        self.region = TERegion(recipe, stage.handle)
        with torch.no_grad(), self.region.entered():
            for module in dict.fromkeys(module for module, _ in products):
                module.prepare()
        is_delayed = settings.fp8_recipe == "delayed"
        self.histories = TeAmaxHistories(products, settings) if is_delayed else None

    def around(self, run: StageRun) -> StageRun:
        """A stage's `run` inside the FP8 region."""

        def inside(*args: Any) -> Tensor:
            with self.region.entered():
                out = run(*args)
            if self.histories is not None and not torch.is_grad_enabled():
                self.histories.forget_pass()
            return out

        return inside
