"""The options of FP8: the recipe of linear layers, of single modules, and parameters in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megtool.optim.config import GATHERS_PARAMETERS, PRECISION
from megtool.options.effects import excludes, requires
from megtool.options.field import Options, option

if TYPE_CHECKING:
    from megtool.kernels.fp8.cast import Kind

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Format = Literal["hybrid", "e4m3"]
Algorithm = Literal["max", "most_recent"]

_HAS_RECIPE = requires("fp8_recipe")
_NOT_IN_FP16 = excludes({"fp16": ""})


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Options):
    """How operands of products are scaled, with Megatron's names and Transformer Engine's meaning.

    `delayed`: a scale for each tensor from the amax of earlier steps (`fp8_amax_history_len` of
    them, by `fp8_amax_compute_algo`), divided by 2^`fp8_margin`. `tensorwise`: from the tensor's
    own amax. `blockwise`: a power of two for each 1x128 elements of inputs and gradients (along the
    summed dim), and each 128x128 of weights. `mxfp8`: for each 32 elements along the summed dim, of
    every operand. `hybrid` has gradients in e5m2 and all other operands in e4m3.
    """

    fp8_recipe: Recipe | None = option(
        PRECISION,
        "Compute linear layers, and those of experts, in FP8 with this recipe.",
        needs=_NOT_IN_FP16,
    )
    te_precision_config_file: Path | None = option(
        PRECISION,
        "Choose the precision of each module: Megatron's configs and matchers, or a recipe as "
        "quantize takes it (FP8: one scale, FP8_PB_WO: blockwise, MXFP8, keep: none); --dry-run "
        "shows the result.",
        metavar="FILE",
        needs=(
            *_NOT_IN_FP16,
            *excludes({"kernels=te": "there all modules of a stage compute by one recipe"}),
        ),
    )
    fp8_format: Format = option(
        PRECISION, "hybrid: e4m3, gradients in e5m2.", "hybrid", needs=(_HAS_RECIPE,)
    )
    fp8_amax_history_len: int = option(
        PRECISION,
        "Steps in the amax history of delayed scaling.",
        1024,
        minimum=1,
        needs=(_HAS_RECIPE,),
    )
    fp8_amax_compute_algo: Algorithm = option(
        PRECISION, "How delayed scaling gets an amax from its history.", "max", needs=(_HAS_RECIPE,)
    )
    fp8_margin: int = option(
        PRECISION,
        "Divide scales of delayed scaling by 2 to the power of this.",
        0,
        above=-64,
        below=64,
        needs=(_HAS_RECIPE,),
    )
    fp8_param_gather: bool = option(
        PRECISION,
        "Keep weights that are used in FP8 as FP8 alone, and all-gather their bytes.",
        False,
        needs=(
            requires(("fp8_recipe", "te_precision_config_file")),
            GATHERS_PARAMETERS,
            *excludes(
                {
                    "fp8_recipe=mxfp8": "MXFP8 rounds every weight twice, along rows and along "
                    "columns, from values that FP8 weights no longer have",
                    "kernels=te": "Transformer Engine casts weights to FP8 itself",
                }
            ),
        ),
    )
    num_layers_at_start_in_bf16: int = option(
        PRECISION, "First layers to keep out of FP8.", 0, minimum=0, needs=(_HAS_RECIPE,)
    )
    num_layers_at_end_in_bf16: int = option(
        PRECISION, "Last layers to keep out of FP8.", 0, minimum=0, needs=(_HAS_RECIPE,)
    )

    @property
    def forward(self) -> Kind:
        """The format of inputs and weights."""
        return "e4m3"

    @property
    def backward(self) -> Kind:
        """The format of gradients."""
        return "e5m2" if self.fp8_format == "hybrid" else "e4m3"

    @property
    def largest(self) -> tuple[float, float]:
        """The largest values of both formats."""
        from megtool.kernels.fp8.cast import LARGEST

        return LARGEST[self.forward], LARGEST[self.backward]
