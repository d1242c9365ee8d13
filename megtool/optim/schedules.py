"""Schedules of learning rate and weight decay, by Megatron's formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """The rates of a run of `train_iters` steps, by its options.

    The learning rate rises from `lr_warmup_init` to `lr` in warm-up, then falls to `min_lr`. Steps
    are samples, as in Megatron's scheduler: an iteration has as many steps as the global batch has
    samples. `decay_steps` includes warm-up; `warmup_steps` need not be whole if it is a share of
    them. With WSD (warm-up, stable, decay) the rate falls in the last `wsd_decay_steps` of
    `decay_steps` only. Weight decay changes over the whole run.

    Raises:
        UsageError: values contradict each other; the hint names the option.
    """

    options: OptimizerConfig
    train_iters: int
    global_batch_size: int = 1

    def __post_init__(self) -> None:
        options, decay_iters = self.options, self.options.lr_decay_iters or self.train_iters
        warmup, wsd_iters = self.warmup_steps / self.global_batch_size, options.lr_wsd_decay_iters
        if warmup >= decay_iters and warmup:
            raise UsageError(
                f"there are {warmup:g} warm-up steps, but the learning rate decays within "
                f"{decay_iters} steps",
                hint=f"at most --lr-warmup-iters {max(0, decay_iters - 1)}, or a larger "
                "--lr-decay-iters",
            )
        is_wsd = options.lr_decay_style == "WSD"
        if is_wsd and (wsd_iters is None or wsd_iters > decay_iters):
            raise UsageError(
                f"a WSD schedule that decays in {wsd_iters} of {decay_iters} steps",
                hint="--lr-wsd-decay-iters: from 1 to --lr-decay-iters",
            )
        start, end = self.start_weight_decay, self.end_weight_decay
        if start > end:
            raise UsageError(
                f"weight decay goes from {start:g} to {end:g}",
                hint="--start-weight-decay: from 0 to --end-weight-decay",
            )
        if options.weight_decay_incr_style == "constant" and start != end:
            raise UsageError(
                f"a constant weight decay from {start:g} to {end:g}",
                hint="--weight-decay-incr-style linear or cosine",
            )

    @property
    def decay_steps(self) -> int:
        """Samples until the rate is at its minimum."""
        return (self.options.lr_decay_iters or self.train_iters) * self.global_batch_size

    @property
    def warmup_steps(self) -> float:
        """Samples of warm-up; a share of `decay_steps` is not rounded, as in Megatron."""
        if self.options.lr_warmup_fraction is not None:
            return self.options.lr_warmup_fraction * self.decay_steps
        return (self.options.lr_warmup_iters or 0) * self.global_batch_size

    @property
    def wsd_decay_steps(self) -> int | None:
        """Samples of the last phase of WSD."""
        iters = self.options.lr_wsd_decay_iters
        return None if iters is None else iters * self.global_batch_size

    @property
    def start_weight_decay(self) -> float:
        """The weight decay at the first step."""
        start = self.options.start_weight_decay
        return self.options.weight_decay if start is None else start

    @property
    def end_weight_decay(self) -> float:
        """The weight decay at the last step."""
        end = self.options.end_weight_decay
        return self.options.weight_decay if end is None else end

    @property
    def wd_incr_steps(self) -> int:
        """Samples in which weight decay changes."""
        return self.train_iters * self.global_batch_size

    def lr(self, step: int) -> float:
        """Return the learning rate after `step` steps."""
        options, warmup, decay = self.options, self.warmup_steps, self.decay_steps
        top, end, kind = options.lr, options.min_lr, options.lr_decay_style
        if warmup > 0 and step <= warmup:
            begin = options.lr_warmup_init
            return begin + (top - begin) * float(step) / float(warmup)
        if kind == "constant":
            return top
        if step > decay:
            return end
        if kind == "inverse-square-root":
            rate: float = top * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5
            return max(end, rate)
        done = float(step - warmup) / float(decay - warmup)
        if kind == "WSD":
            part = self._stable_then_decay(step)
        elif kind == "cosine":
            part = 0.5 * (math.cos(math.pi * done) + 1.0)
        else:
            part = 1.0 - done
        return end + part * (top - end)

    def _stable_then_decay(self, step: int) -> float:
        """Return WSD's fraction of the way from `min_lr` to `lr`."""
        length = self.wsd_decay_steps or 1
        begin = self.decay_steps - length
        if step <= begin:
            return 1.0
        done = float(step - begin) / float(length)
        style = self.options.lr_wsd_decay_style
        if style == "linear":
            return 1.0 - done
        if style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        if style == "minus_sqrt":
            return 1.0 - math.sqrt(done)
        return 2.0 * math.pow(0.5, done) - 1.0

    def weight_decay(self, step: int) -> float:
        """Return the weight decay after `step` steps, without a group's `wd_mult`."""
        start, end, steps = self.start_weight_decay, self.end_weight_decay, self.wd_incr_steps
        style = self.options.weight_decay_incr_style
        if style == "constant" or step > steps or not steps:
            return end
        done = float(step) / float(steps)
        if style == "cosine":
            done = 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return start + done * (end - start)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return Megatron's `opt_param_scheduler`, `step` being its `num_steps`.

        As in Megatron, `lr_warmup_init` and the options of WSD are not in it.
        """
        return {
            "max_lr": self.options.lr,
            "lr_warmup_steps": self.warmup_steps,
            "num_steps": step,
            "lr_decay_style": self.options.lr_decay_style,
            "lr_decay_steps": self.decay_steps,
            "min_lr": self.options.min_lr,
            "start_wd": self.start_weight_decay,
            "end_wd": self.end_weight_decay,
            "wd_incr_style": self.options.weight_decay_incr_style,
            "wd_incr_steps": self.wd_incr_steps,
        }
