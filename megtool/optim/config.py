"""The options of an optimizer: its kind, schedules, precision, memory and communication."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megtool.errors import UsageError
from megtool.options.effects import at_most, excludes, needs_also, requires
from megtool.options.field import OptionCondition, Options, option

OPTIMIZER, PRECISION, MEMORY = "Optimizer", "Precision", "Memory"
DATA_PARALLEL = "Data parallelism"


def shares_out_state(options: Any, facts: Any) -> bool:
    """Return whether replicas share out at least the optimizer's state."""
    strategy = options.data_parallel_sharding_strategy
    return strategy != "no_shard" and options.use_distributed_optimizer is not False


GATHERS_PARAMETERS = OptionCondition(
    holds=shares_out_state,
    reason="and replicas that share out nothing exclude each other",
    hint="--use-distributed-optimizer",
    is_conflict=True,
)
"""The condition of parameters that are gathered from replicas."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Settings of parameters whose Megatron name matches `glob`; the first matching rule applies.

    `lr_mult` multiplies the learning rate; `wd_mult` replaces the factor of weight decay (None:
    0 for biases and 1-D parameters, 1 for others).
    """

    glob: str
    lr_mult: float = 1.0
    wd_mult: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Options):
    """How parameters are updated, with Megatron's names. Steps are optimizer steps.

    Raises:
        UsageError: a value is out of its range, or a rule of `lr_mult` or `wd_mult` is malformed.
    """

    # ---- Precision
    loss_scale: float | None = option(
        PRECISION,
        "A constant loss scale; default: dynamic.",
        metavar="X",
        above=0,
        needs=(requires("fp16"),),
    )
    initial_loss_scale: float = option(
        PRECISION, "Initial dynamic loss scale.", 65536.0, metavar="X", minimum=1
    )
    min_loss_scale: float = option(
        PRECISION, "Minimum dynamic loss scale.", 1.0, metavar="X", above=0
    )
    loss_scale_window: int = option(
        PRECISION,
        "Steps without overflow until the loss scale doubles.",
        1000,
        metavar="N",
        minimum=1,
    )
    hysteresis: int = option(
        PRECISION, "Overflows until the loss scale halves.", 2, metavar="N", minimum=1
    )
    grad_reduce_in_bf16: bool = option(
        PRECISION, "Reduce gradients in the model's dtype instead of float32.", False
    )
    store_param_remainders: bool = option(
        PRECISION,
        "Store only the low 16 bits of master weights; the weights are the high ones.",
        False,
        needs=excludes({"fp16": "the high bits are bf16", "fp32": "the high bits are bf16"}),
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = option(
        PRECISION, "Dtype of the optimizer's moments.", "fp32"
    )
    # ---- Memory
    gradient_accumulation_fusion: bool = option(
        MEMORY, "Add products straight to the sums of weights' gradients.", True
    )
    optimizer_cpu_offload: bool = option(
        MEMORY, "Keep and update optimizer state on the CPU; all of it without a fraction.", False
    )
    optimizer_offload_fraction: float = option(
        MEMORY,
        "Fraction of optimizer state kept on the CPU.",
        0.0,
        metavar="X",
        minimum=0,
        maximum=1,
    )
    # ---- Optimizer
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
    adam_eps: float = option(OPTIMIZER, "Adam's epsilon.", 1e-8, metavar="X", minimum=0)
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
    # ---- Data parallelism
    overlap_grad_reduce: bool = option(
        DATA_PARALLEL, "Reduce gradients during the backward pass.", False
    )
    overlap_param_gather: bool = option(
        DATA_PARALLEL, "Gather parameters in forward passes.", False, needs=(GATHERS_PARAMETERS,)
    )
    ddp_bucket_size: int | None = option(
        DATA_PARALLEL, "Elements in a gradient bucket.", metavar="N", minimum=1
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = option(
        DATA_PARALLEL,
        "Pad gradient buckets to multiples of 65536 elements, for many GPUs.",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rules

    @property
    def offload_fraction(self) -> float:
        """The fraction of the state that is kept and updated on the CPU."""
        return self.optimizer_offload_fraction or float(self.optimizer_cpu_offload)

    @cached_property
    def rules(self) -> tuple[GroupRule, ...]:
        """The rules of `lr_mult` and `wd_mult`, merged by pattern.

        Raises:
            UsageError: one has no pattern, or no number of 0 or more.
        """
        factors: dict[str, dict[str, float]] = {}
        for name, texts in (("lr_mult", self.lr_mult), ("wd_mult", self.wd_mult)):
            for text in texts:
                glob, _, number = text.rpartition("=")
                try:
                    factor = float(number)
                except ValueError:
                    factor = math.nan
                if not glob or not 0.0 <= factor < math.inf:
                    raise UsageError(
                        f"--{name.replace('_', '-')} is {text!r}",
                        hint="give PATTERN=NUMBER, such as '*.mlp.*=0.5', with a number of 0 or "
                        "more",
                    )
                factors.setdefault(glob, {})[name] = factor
        return tuple(GroupRule(glob, **values) for glob, values in factors.items())
