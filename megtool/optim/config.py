"""The configuration of an optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megtool.errors import UsageError


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Settings of parameters whose Megatron name matches `glob`; the first matching rule applies.

    `lr_mult` multiplies the learning rate; `wd_mult` replaces the factor of weight decay (None:
    0 for biases and 1-D parameters, 1 for others); `max_lr` and `min_lr` replace those of the
    schedule.
    """

    glob: str
    lr_mult: float = 1.0
    wd_mult: float | None = None
    max_lr: float | None = None
    min_lr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated; names and defaults are Megatron's where it has them.

    `lr`, `min_lr` and `weight_decay` are those of the schedule; `Optimizer.step` gets the values of
    each step. `optimizer="muon"` updates matrices between embedding and output layer with Muon
    (`muon_momentum`, `muon_steps` of Newton-Schulz), with experts, queries, keys and values as
    separate matrices, and other parameters with Adam. `clip_grad`: the largest norm of the
    gradient, 0 for no clipping. `loss_scale`: a constant; None is 1, or dynamic with fp16
    parameters, and is saved times `loss_scale_unit` (see `DynamicGradScaler`).
    `main_params="remainder"`: an fp32 main parameter is a bf16 parameter and 16 more bits.
    `moments`: the dtype of Adam's and SGD's states; they are updated in fp32. `offload_fraction`:
    the fraction of the state that is kept and updated on the CPU. `reduce_in_fp32`: bf16 gradients
    are sent as bf16 and summed in fp32. `bucket_size` is in elements, None for Megatron's default.

    Raises:
        UsageError: a value is out of its range; the hint names the option.
    """

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    lr: float = 1e-5
    min_lr: float = 0.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_steps: int = 5
    clip_grad: float = 1.0
    count_zeros: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    loss_scale_unit: float = 1.0
    hysteresis: int = 2
    main_params: Literal["float32", "remainder"] = "float32"
    moments: Literal["float32", "bfloat16"] = "float32"
    offload_fraction: float = 0.0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    reduce_in_fp32: bool = False
    fp8_param_gather: bool = False
    fuse_gradient_accumulation: bool = True
    bucket_size: int | None = None
    pad_buckets: bool = False
    rules: tuple[GroupRule, ...] = ()

    def __post_init__(self) -> None:
        for field, options in _CHOICES.items():
            if getattr(self, field) not in options:
                _refuse(self, field, "one of " + ", ".join(options))
        for field in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad"):
            if not 0.0 <= getattr(self, field) < math.inf:
                _refuse(self, field, "0 or more")
        for field in ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"):
            if not 0.0 <= getattr(self, field) < 1.0:
                _refuse(self, field, "0 or more, and less than 1")
        for field in ("initial_loss_scale", "min_loss_scale", "loss_scale_unit"):
            if not 0.0 < getattr(self, field) < math.inf:
                _refuse(self, field, "more than 0")
        for field in ("loss_scale_window", "hysteresis", "muon_steps"):
            if getattr(self, field) < 1:
                _refuse(self, field, "1 or more")
        if self.loss_scale is not None and not 0.0 < self.loss_scale < math.inf:
            _refuse(self, "loss_scale", "more than 0")
        if self.min_lr > self.lr:
            _refuse(self, "min_lr", f"at most --lr, which is {self.lr:g}")
        if self.min_loss_scale > self.initial_loss_scale:
            _refuse(self, "min_loss_scale", f"at most {self.initial_loss_scale:g}, the initial one")
        if not 0.0 <= self.offload_fraction <= 1.0:
            _refuse(self, "offload_fraction", "from 0 to 1")
        if self.bucket_size is not None and self.bucket_size < 1:
            _refuse(self, "bucket_size", "1 or more")
        for rule in self.rules:
            _check_rule(rule)

    @property
    def moment_dtype(self) -> torch.dtype:
        """The dtype of states."""
        return torch.bfloat16 if self.moments == "bfloat16" else torch.float32


_CHOICES = {
    "optimizer": ("adam", "sgd", "muon"),
    "main_params": ("float32", "remainder"),
    "moments": ("float32", "bfloat16"),
}
# Options with another name than their field.
_OPTIONS = {
    "offload_fraction": "optimizer-offload-fraction",
    "bucket_size": "ddp-bucket-size",
    "count_zeros": "log-num-zeros-in-grad",
}


def _refuse(settings: OptimizerConfig, field: str, expected: str) -> None:
    option = _OPTIONS.get(field, field.replace("_", "-"))
    raise UsageError(
        f"{field} is {getattr(settings, field)!r}", hint=f"--{option} has to be {expected}"
    )


def _check_rule(rule: GroupRule) -> None:
    for field in ("lr_mult", "wd_mult", "max_lr", "min_lr"):
        value = getattr(rule, field)
        if value is not None and not 0.0 <= value < math.inf:
            raise UsageError(
                f"the rule for {rule.glob!r} has {field}={value!r}", hint="it has to be 0 or more"
            )
    if rule.max_lr is not None and rule.min_lr is not None and rule.min_lr > rule.max_lr:
        raise UsageError(
            f"the rule for {rule.glob!r} has min_lr={rule.min_lr:g} above max_lr={rule.max_lr:g}",
            hint="min_lr has to be at most max_lr",
        )
