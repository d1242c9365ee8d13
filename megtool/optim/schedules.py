"""Schedules of learning rate and weight decay, by Megatron's formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megtool.errors import UsageError

Kind = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """The learning rate rises from `init_lr` to `max_lr` in warm-up, then falls to `min_lr`.

    Steps are samples, as in Megatron's scheduler: an iteration has as many steps as the global
    batch has samples. `decay_steps` includes warm-up; `warmup_steps` need not be whole if it is a
    share of them. Weight decay goes from `start_wd` to `end_wd` in `wd_incr_steps`. With
    `kind="WSD"` (warm-up, stable, decay) the rate falls in the last `wsd_decay_steps` of
    `decay_steps` only.

    Raises:
        UsageError: values contradict each other; the hint names the option.
    """

    kind: Kind = "constant"
    max_lr: float = 1e-5
    min_lr: float = 0.0
    warmup_steps: float = 0
    decay_steps: int = 1
    init_lr: float = 0.0
    wsd_decay_steps: int | None = None
    wsd_decay_style: WsdStyle = "exponential"
    start_wd: float = 0.01
    end_wd: float = 0.01
    wd_incr_style: DecayStyle = "constant"
    wd_incr_steps: int = 0

    def __post_init__(self) -> None:
        for value, options, option in (
            (self.kind, get_args(Kind), "lr-decay-style"),
            (self.wsd_decay_style, get_args(WsdStyle), "lr-wsd-decay-style"),
            (self.wd_incr_style, get_args(DecayStyle), "weight-decay-incr-style"),
        ):
            if value not in options:
                raise UsageError(
                    f"there is no schedule {value!r}", hint=f"--{option}: {', '.join(options)}"
                )
        for wrong, message, hint in self._faults():
            if wrong:
                raise UsageError(message, hint=hint)

    def _faults(self) -> list[tuple[bool, str, str]]:
        ends = f"the learning rate goes from {self.max_lr:g} to {self.min_lr:g}"
        wsd = self.wsd_decay_steps
        return [
            (not 0.0 <= self.min_lr <= self.max_lr, ends, "--min-lr: from 0 to --lr"),
            (
                not self.init_lr <= self.max_lr,
                f"warm-up begins at {self.init_lr:g}, above {self.max_lr:g}",
                "--lr-warmup-init: at most --lr",
            ),
            (self.warmup_steps < 0, f"{self.warmup_steps} warm-up steps", "0 or more"),
            (
                not self.warmup_steps < self.decay_steps,
                f"warm-up of {self.warmup_steps} steps in a schedule of {self.decay_steps}",
                "--lr-warmup-iters has to be less than --lr-decay-iters (else --train-iters)",
            ),
            (
                self.kind == "WSD" and (wsd is None or not 0 < wsd <= self.decay_steps),
                f"a WSD schedule that decays in {wsd} of {self.decay_steps} steps",
                "--lr-wsd-decay-iters: from 1 to --lr-decay-iters",
            ),
            (
                not 0.0 <= self.start_wd <= self.end_wd,
                f"weight decay goes from {self.start_wd:g} to {self.end_wd:g}",
                "--start-weight-decay: from 0 to --end-weight-decay",
            ),
            (
                self.wd_incr_style == "constant" and self.start_wd != self.end_wd,
                f"a constant weight decay from {self.start_wd:g} to {self.end_wd:g}",
                "--weight-decay-incr-style linear or cosine",
            ),
            (self.wd_incr_steps < 0, f"weight decay grows in {self.wd_incr_steps} steps", "0 up"),
        ]

    def lr(self, step: int, *, max_lr: float | None = None, min_lr: float | None = None) -> float:
        """The learning rate after `step` steps; a group may have its own `max_lr` and `min_lr`."""
        top = self.max_lr if max_lr is None else max_lr
        end = self.min_lr if min_lr is None else min_lr
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (top - self.init_lr) * float(step) / float(self.warmup_steps)
        if self.kind == "constant":
            return top
        if step > self.decay_steps:
            return end
        if self.kind == "inverse-square-root":
            rate: float = top * max(self.warmup_steps, 1) ** 0.5 / max(step, 1) ** 0.5
            return max(end, rate)
        done = float(step - self.warmup_steps) / float(self.decay_steps - self.warmup_steps)
        if self.kind == "WSD":
            part = self._stable_then_decay(step)
        elif self.kind == "cosine":
            part = 0.5 * (math.cos(math.pi * done) + 1.0)
        else:
            part = 1.0 - done
        return end + part * (top - end)

    def _stable_then_decay(self, step: int) -> float:
        """WSD's fraction of the way from `min_lr` to `max_lr`."""
        length = self.wsd_decay_steps or 1
        begin = self.decay_steps - length
        if step <= begin:
            return 1.0
        done = float(step - begin) / float(length)
        if self.wsd_decay_style == "linear":
            return 1.0 - done
        if self.wsd_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        if self.wsd_decay_style == "minus_sqrt":
            return 1.0 - math.sqrt(done)
        return 2.0 * math.pow(0.5, done) - 1.0

    def weight_decay(self, step: int) -> float:
        """The weight decay after `step` steps, without a group's `wd_mult`."""
        if self.wd_incr_style == "constant" or step > self.wd_incr_steps or not self.wd_incr_steps:
            return self.end_wd
        done = float(step) / float(self.wd_incr_steps)
        if self.wd_incr_style == "cosine":
            done = 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start_wd + done * (self.end_wd - self.start_wd)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Megatron's `opt_param_scheduler`, `step` being its `num_steps`.

        As in Megatron, `init_lr` and the options of WSD are not in it.
        """
        return {
            "max_lr": self.max_lr,
            "lr_warmup_steps": self.warmup_steps,
            "num_steps": step,
            "lr_decay_style": self.kind,
            "lr_decay_steps": self.decay_steps,
            "min_lr": self.min_lr,
            "start_wd": self.start_wd,
            "end_wd": self.end_wd,
            "wd_incr_style": self.wd_incr_style,
            "wd_incr_steps": self.wd_incr_steps,
        }
