"""Options of the optimizer: its kind, learning rates, weight decay and clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megtool.options.effects import at_most, needs_also
from megtool.options.field import Options, option

OPTIMIZER = "Optimizer"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """The optimizer and its schedules, with Megatron's names. Steps are optimizer steps."""

    optimizer: Literal["adam", "sgd", "muon"] = option(
        OPTIMIZER,
        "adam: AdamW; muon: Muon for matrices (each expert, and q, k and v, separately), AdamW for "
        "other parameters.",
        "adam",
    )
    lr: float = option(OPTIMIZER, "Maximum learning rate.", 1e-5, metavar="X", minimum=0)
    min_lr: float = option(
        OPTIMIZER,
        "Minimum learning rate.",
        0.0,
        metavar="X",
        minimum=0,
        needs=(at_most("min_lr", "lr"),),
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        OPTIMIZER,
        "How the learning rate decays.",
        "linear",
        needs=(needs_also("lr_wsd_decay_iters", "WSD"),),
    )
    lr_decay_iters: int | None = option(
        OPTIMIZER,
        "Steps until the rate is --min-lr; default: --train-iters.",
        metavar="N",
        minimum=1,
    )
    lr_warmup_iters: int | None = option(
        OPTIMIZER,
        "Warm-up steps of the learning rate.",
        metavar="N",
        minimum=0,
        alias="--lr-warmup-steps",
    )
    lr_warmup_fraction: float | None = option(
        OPTIMIZER, "Warm-up as a share of --lr-decay-iters.", metavar="X", minimum=0, maximum=1
    )
    lr_warmup_init: float = option(
        OPTIMIZER,
        "Learning rate at the start of warm-up.",
        0.0,
        metavar="X",
        needs=(at_most("lr_warmup_init", "lr"),),
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = option(
        OPTIMIZER, "How the rate decays in the last phase of WSD.", "exponential"
    )
    lr_wsd_decay_iters: int | None = option(
        OPTIMIZER, "Steps of the last phase of WSD.", metavar="N", minimum=1
    )
    weight_decay: float = option(
        OPTIMIZER,
        "Weight decay of matrices; biases and norms have none.",
        0.01,
        metavar="X",
        minimum=0,
    )
    start_weight_decay: float | None = option(
        OPTIMIZER,
        "Weight decay at the first step; default: --weight-decay.",
        metavar="X",
        minimum=0,
    )
    end_weight_decay: float | None = option(
        OPTIMIZER, "Weight decay at the last step; default: --weight-decay.", metavar="X", minimum=0
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        OPTIMIZER, "How weight decay changes from the first to the last step.", "constant"
    )
    adam_beta1: float = option(OPTIMIZER, "Adam's beta1.", 0.9, metavar="X", minimum=0, below=1)
    adam_beta2: float = option(OPTIMIZER, "Adam's beta2.", 0.999, metavar="X", minimum=0, below=1)
    adam_eps: float = option(OPTIMIZER, "Adam's epsilon.", 1e-8, metavar="X")
    sgd_momentum: float = option(
        OPTIMIZER, "Momentum of sgd.", 0.9, metavar="X", minimum=0, below=1
    )
    muon_momentum: float = option(
        OPTIMIZER, "Momentum of muon.", 0.95, metavar="X", minimum=0, below=1
    )
    clip_grad: float = option(
        OPTIMIZER, "Clip the gradient to this norm; 0: no clipping.", 1.0, metavar="X", minimum=0
    )
    log_num_zeros_in_grad: bool = option(
        OPTIMIZER, "Also log the number of zeros in the gradient (num_zeros).", False
    )
    lr_mult: tuple[str, ...] = option(
        OPTIMIZER,
        "Multiply the learning rate of parameters: '*.bias=0.1'; repeatable.",
        (),
        metavar="GLOB=X",
    )
    wd_mult: tuple[str, ...] = option(
        OPTIMIZER,
        "Multiply the weight decay of parameters; repeatable.",
        (),
        metavar="GLOB=X",
    )
