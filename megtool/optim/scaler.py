"""Loss scales: what a loss is multiplied with so that fp16 gradients do not vanish."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megtool.optim.config import OptimizerConfig


class GradScaler(Protocol):
    """A loss scale that is told after each step whether gradients were finite."""

    @property
    def scale(self) -> float:
        """What the loss is multiplied with now."""

    def update(self, found_inf: bool) -> None:
        """A step's gradients were found (not) finite."""

    def state_dict(self) -> dict[str, Any]:
        """What Megatron saves as `grad_scaler`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` or Megatron has given."""


class ConstantGradScaler:
    """A scale that stays as it is. It has no state."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class DynamicGradScaler:
    """A scale that halves after overflows and doubles after `window` steps without one.

    As in Megatron: `hysteresis` overflows are let pass, counted over steps that need not be in a
    row, and the count starts anew only when the scale grows. So from the `hysteresis`-th overflow
    on, every one halves the scale, until it has grown again.

    `unit` is how many times larger a scale of the same effect is where it is saved: Megatron's is
    of losses that are means over so many tokens, and ours are sums.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**32,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
        growth: float = 2.0,
        backoff: float = 0.5,
        unit: float = 1.0,
    ) -> None:
        self.scale = initial
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.growth = growth
        self.backoff = backoff
        self.unit = unit
        self._good = 0
        self._left = hysteresis

    def update(self, found_inf: bool) -> None:
        """A step's gradients were found (not) finite."""
        if found_inf:
            self._good = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = max(_float32(self.scale * self.backoff), self.minimum)
            return
        self._good += 1
        if self._good == self.window:
            self._good = 0
            self._left = self.hysteresis
            grown = _float32(self.scale * self.growth)
            # Half of infinity is infinity: there would be no way back.
            self.scale = grown if math.isfinite(_float32(grown * self.unit)) else self.scale

    def state_dict(self) -> dict[str, Any]:
        """`scale` (an fp32 tensor of one element), `growth_tracker`, `hysteresis_tracker`."""
        return {
            "scale": torch.tensor([self.scale * self.unit], dtype=torch.float32),
            "growth_tracker": self._good,
            "hysteresis_tracker": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` or Megatron has given."""
        scale = state["scale"]
        self.scale = float(scale.item() if isinstance(scale, Tensor) else scale) / self.unit
        self._good = int(state["growth_tracker"])
        self._left = int(state["hysteresis_tracker"])


def make_grad_scaler(settings: OptimizerConfig, *, has_fp16: bool) -> GradScaler:
    """The loss scale of a model of which some parameters, on any rank, are fp16, or none."""
    if settings.loss_scale is not None:
        return ConstantGradScaler(settings.loss_scale)
    if not has_fp16:
        return ConstantGradScaler()
    return DynamicGradScaler(
        initial=settings.initial_loss_scale,
        minimum=settings.min_loss_scale,
        window=settings.loss_scale_window,
        hysteresis=settings.hysteresis,
        unit=settings.loss_scale_unit,
    )


def _float32(value: float) -> float:
    """The nearest fp32 value, in which Megatron keeps the scale."""
    return float(torch.tensor(value, dtype=torch.float32))
