"""The straight-through estimator (Bengio et al., 2013): gradients pass rounding unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def straight_through(tap: Callable[..., Any], *, is_pair: bool) -> Callable[..., Any]:
    """A tap that gradients pass through unchanged."""
    if is_pair:

        def key_value(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                rounded = tap(key.detach(), value.detach())
            return _apply_straight_through(key, rounded[0]), _apply_straight_through(
                value, rounded[1]
            )

        return key_value

    def single(x: Tensor, *more: Any) -> Tensor:
        with torch.no_grad():
            rounded = tap(x.detach(), *more)
        return _apply_straight_through(x, rounded)

    return single


def _apply_straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    out: Tensor = _StraightThrough.apply(x, rounded)  # type: ignore[no-untyped-call]
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone() if rounded is x else rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None
