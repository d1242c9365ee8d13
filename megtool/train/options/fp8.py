"""Options of FP8: the recipe of a run, of single modules, and of the parameters' memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megtool.options.effects import excludes, requires
from megtool.options.field import Options, option
from megtool.train.options.data_parallel import GATHERS_PARAMETERS
from megtool.train.options.model_facts import IS_DECODER

PRECISION = "Precision"

_HAS_RECIPE = requires("fp8_recipe")
_NOT_IN_FP16 = excludes({"fp16": ""})


@dataclass(frozen=True, kw_only=True)
class Fp8Options(Options):
    """What is computed and kept in FP8, with Megatron's names."""

    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = option(
        PRECISION,
        "Compute linear layers, and those of experts, in FP8 with this recipe.",
        needs=(*_NOT_IN_FP16, IS_DECODER),
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
    fp8_format: Literal["hybrid", "e4m3"] = option(
        PRECISION, "hybrid: e4m3, gradients in e5m2.", "hybrid", needs=(_HAS_RECIPE,)
    )
    fp8_amax_history_len: int = option(
        PRECISION,
        "Steps in the amax history of delayed scaling.",
        1024,
        minimum=1,
        needs=(_HAS_RECIPE,),
    )
    fp8_amax_compute_algo: Literal["max", "most_recent"] = option(
        PRECISION, "How delayed scaling gets an amax from its history.", "max", needs=(_HAS_RECIPE,)
    )
    fp8_margin: int = option(
        PRECISION,
        "Divide scales of delayed scaling by 2 to the power of this.",
        0,
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
