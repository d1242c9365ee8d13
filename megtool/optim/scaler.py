"""Loss scales, which keep fp16 gradients from vanishing."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megtool.optim.config import OptimizerConfig


class GradScaler(Protocol):
    """A loss scale that is updated after each step."""

    @property
    def scale(self) -> float:
        """The current loss scale."""

    def update(self, found_inf: bool) -> None:
        """Update the scale after a step whose gradients had, or had not, a NaN or Inf."""

    def state_dict(self) -> dict[str, Any]:
        """What Megatron saves as `grad_scaler`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict` or of Megatron."""


class ConstantGradScaler:
    """A constant scale. It has no state."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class DynamicGradScaler:
    """A scale that halves after overflows and doubles after `window` steps without one.

    As in Megatron, overflows count against `hysteresis`, also if they are not consecutive, and the
    count is reset only when the scale grows: from the `hysteresis`-th overflow on, every overflow
    halves the scale, until it has grown again.

    Saved scales are multiplied by `unit`: Megatron's are for losses that are means over so many
    tokens, and megtool's losses are sums.
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
        """Update the scale after a step whose gradients had, or had not, a NaN or Inf."""
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
            # Half of infinity is infinity: the scale could not fall again.
            self.scale = grown if math.isfinite(_float32(grown * self.unit)) else self.scale

    def state_dict(self) -> dict[str, Any]:
        """`scale` (an fp32 tensor of one element), `growth_tracker`, `hysteresis_tracker`."""
        return {
            "scale": torch.tensor([self.scale * self.unit], dtype=torch.float32),
            "growth_tracker": self._good,
            "hysteresis_tracker": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict` or of Megatron."""
        scale = state["scale"]
        self.scale = float(scale.item() if isinstance(scale, Tensor) else scale) / self.unit
        self._good = int(state["growth_tracker"])
        self._left = int(state["hysteresis_tracker"])


def make_grad_scaler(settings: OptimizerConfig, *, has_fp16: bool, unit: float = 1.0) -> GradScaler:
    """Return the loss scale; `has_fp16`: some parameters on any rank are fp16.

    It is `unit` times smaller than that of the settings.
    """
    if settings.loss_scale is not None:
        return ConstantGradScaler(settings.loss_scale / unit)
    if not has_fp16:
        return ConstantGradScaler()
    return DynamicGradScaler(
        initial=settings.initial_loss_scale / unit,
        minimum=min(settings.initial_loss_scale, settings.min_loss_scale) / unit,
        window=settings.loss_scale_window,
        hysteresis=settings.hysteresis,
        unit=unit,
    )


def _float32(value: float) -> float:
    """The nearest fp32 value, the dtype of Megatron's scale."""
    return float(torch.tensor(value, dtype=torch.float32))
