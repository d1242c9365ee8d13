"""Quantization-aware training: passes with rounded weights and inputs, updates of the weights' own.

Weights are rounded once a step, in their place, and come back before the optimizer looks at them:
gradients are taken at the rounded weights and applied to the weights' own (straight-through,
Bengio et al., 2013), and so are those of rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megtool.model.decoder import Decoder
from megtool.model.hook_locations import HookLocation
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.qparams import QParams


class QatFeature:
    """The stages of a model, which compute in `with around()` as an engine would after `quantize`.

    `settlement` says what becomes of weights, inputs and caches at `points`. Scales of inputs and
    factors of columns stay what calibration has found; scales of weights follow the weights, and
    codes that were chosen for weights as they were (GPTQ) are let go of. Memory: a copy of the
    weights that are rounded, while the block lasts. Every rank makes the same calls.

    Raises:
        UsageError: modules that multiply the same input would round it in different ways.
        CalibrationError: an input's scale has to come from calibration and did not.
    """

    def __init__(
        self, stages: Sequence[Decoder], points: Iterable[ActivationSite], settlement: QParams
    ) -> None:
        listed = tuple(points)
        self._settlement = QParams(
            weights={m: replace(t, amax=None, codes=None) for m, t in settlement.weights.items()},
            kv_caches=dict(settlement.kv_caches),
            norm_scales=dict(settlement.norm_scales),
        )
        # Siblings that share the scale of a whole tensor.
        self._shared = [
            siblings
            for p in listed
            if len(siblings := self._with_second(p.modules)) > 1 and p.kind == "input"
        ]
        self._stages = [
            (
                stage,
                FakeQuantModel(
                    stage,
                    listed,
                    self._settlement,
                    weights=True,
                    dtype=str(stage.dtype).removeprefix("torch."),
                ),
            )
            for stage in stages
        ]

    def _with_second(self, modules: Iterable[str]) -> list[str]:
        held = self._settlement.weights
        return [m for m in modules if m in held and held[m].global_amax]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Compute as the engine will, until the end of the block; the weights are then the same."""
        originals: list[tuple[Tensor, Tensor]] = []
        previous_taps: list[tuple[HookLocation, Any]] = []
        try:
            with torch.no_grad():
                for stage, simulation in self._stages:
                    self._update_shared_scales(simulation)
                    for layer in simulation.layers:
                        for name, rounded in simulation.rounded(layer).items():
                            parameter = stage.get_parameter(name)
                            originals.append((parameter, parameter.detach().clone()))
                            parameter.copy_(rounded)
            for _, simulation in self._stages:
                for place, tap in simulation.taps:
                    previous_taps.append((place, getattr(place.module, place.attribute)))
                    place.set(_straight_through(tap, is_pair=place.attribute == "cache_tap"))
            yield
        finally:
            for place, tap in reversed(previous_taps):
                place.set(tap)
            with torch.no_grad():
                for weight, values in originals:
                    weight.copy_(values)

    def _update_shared_scales(self, simulation: FakeQuantModel) -> None:
        """Let shared scales of whole tensors be those of the weights as they are now."""
        treatments = self._settlement.weights
        for modules in self._shared:
            tops: list[float] = []
            for module in modules:
                weight = simulation.weight(module)
                if weight is not None:
                    columns = treatments[module].smoothing_scale
                    if columns is not None:
                        weight = weight * torch.as_tensor(columns, device=weight.device)
                    tops.append(float(weight.abs().max()))
            top = max(tops, default=0.0)
            for module in modules if top else ():
                treatments[module] = replace(treatments[module], second_amax=top)


def _straight_through(tap: Callable[..., Any], *, is_pair: bool) -> Callable[..., Any]:
    """A tap through which gradients pass as if it were not there."""
    if is_pair:

        def key_value(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                rounded = tap(key.detach(), value.detach())
            return _apply_straight_through(key, rounded[0]), _apply_straight_through(value, rounded[1])

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
