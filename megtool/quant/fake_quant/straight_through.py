"""The straight-through estimator (Bengio et al., 2013): gradients pass rounding unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megtool.model.stacks.hook_locations import HookLocation
from megtool.quant.fake_quant.input_rounding import DividingHook

Tap = Callable[..., Any]


def straight_through(
    taps: Iterable[tuple[HookLocation, Tap]],
) -> Iterator[tuple[HookLocation, Tap]]:
    """Taps that round, as ones whose rounding gradients pass unchanged."""
    for place, tap in taps:
        yield place, _pass_gradients(tap, is_pair=place.attribute == "cache_tap")


def _pass_gradients(tap: Tap, *, is_pair: bool) -> Tap:
    if is_pair:

        def key_value(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                rounded = tap(key.detach(), value.detach())
            return _apply_straight_through(key, rounded[0]), _apply_straight_through(
                value, rounded[1]
            )

        return key_value

    rounding: Tap | None = tap
    divide: Tap | None = None
    if isinstance(tap, DividingHook):
        divide, rounding = tap.divide, tap.round

    def single(x: Tensor, *more: Any) -> Tensor:
        x = x if divide is None else divide(x, *more)
        if rounding is None:
            return x
        with torch.no_grad():
            rounded = rounding(x.detach(), *more)
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
