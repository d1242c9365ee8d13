"""How engines round the inputs of modules and what they keep in a KV cache, as activation hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megtool.model.stacks.hook_locations import HookLocation
from megtool.parallel.collectives import all_max
from megtool.quant.fake_quant.fake_quantize import (
    cache_kind,
    cache_scale,
    input_scale,
    needs_scale,
    rounded_input,
)
from megtool.quant.qparams import KVCacheQParams, WeightQParams
from megtool.quant.recipes.formats import ENGINE_INPUTS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRounding:
    """The rounding of one input: its kind (of `formats.ENGINE_INPUTS`, or `int8:token`; empty for
    none), scale and smoothing scales `[in]` that inputs are divided by first.

    `stays_divided`: the weight is stored multiplied by them. Otherwise they are removed again.
    """

    kind: str
    scale: float = 0.0
    columns: Tensor | None = None
    stays_divided: bool = False

    def equals(self, other: InputRounding | None) -> bool:
        """Whether another rounding is the same."""
        if other is None or (self.kind, self.scale) != (other.kind, other.scale):
            return False
        if self.stays_divided != other.stays_divided:
            return False
        if self.columns is None or other.columns is None:
            return self.columns is other.columns
        return torch.equal(self.columns, other.columns)

    def local(self, place: HookLocation, device: torch.device) -> InputRounding:
        """The rounding for a rank's columns, on its device."""
        columns, group = self.columns, place.columns
        if columns is None:
            return self
        width = len(columns) // group.size
        return replace(self, columns=columns[group.rank * width :][:width].to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRounding:
    """The rounding of cached keys (after RoPE) and values: a kind with a scale of each."""

    kind: str
    key_scale: float
    value_scale: float

    @classmethod
    def of(cls, cache: KVCacheQParams) -> CacheRounding:
        """The rounding of calibrated caches.

        Raises:
            CalibrationError: an amax is unknown.
        """
        return cls(
            kind=cache_kind(cache),
            key_scale=cache_scale(cache, cache.key_amax),
            value_scale=cache_scale(cache, cache.value_amax),
        )

    def hook(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are read from the cache, `[..., head size]`."""
        return (
            rounded_input(key, self.kind, scale=self.key_scale),
            rounded_input(value, self.kind, scale=self.value_scale),
        )


def rounding_of(params: WeightQParams | None, *, folded: bool) -> InputRounding | None:
    """The rounding of a module's inputs; None if engines do not round them.

    `folded`: the norms of the model contain their smoothing scales, so that inputs are only divided
    by stored ones.

    Raises:
        CalibrationError: the scale of the inputs is unknown.
    """
    kind = None if params is None else ENGINE_INPUTS.get(params.format.algo)
    if params is None or (kind is None and not params.is_smoothed):
        return None
    smoothing_scale = params.smoothing_scale
    if folded and not params.stores_pre_quant_scale:
        smoothing_scale = None
    return InputRounding(
        kind=kind or "",
        stays_divided=params.is_smoothed,
        scale=float(input_scale(params)) if needs_scale(params) else 0.0,
        columns=None
        if smoothing_scale is None
        else torch.from_numpy(np.array(smoothing_scale, np.float32)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DividingHook:
    """A hook that divides inputs by smoothing scales, and rounds the quotients (None: does not)."""

    divide: Callable[..., Tensor]
    round: Callable[..., Tensor] | None

    def __call__(self, x_TI: Tensor, *more: Tensor) -> Tensor:
        """The rows that the weight is multiplied with."""
        x_TI = self.divide(x_TI, *more)
        return x_TI if self.round is None else self.round(x_TI, *more)


def input_hook(rounding: InputRounding, place: HookLocation) -> Callable[[Tensor], Tensor]:
    """The hook that rounds the rows of one place."""
    group, divisors = place.columns, rounding.columns
    if rounding.stays_divided and divisors is not None:
        inner = replace(rounding, columns=None, stays_divided=False)
        return DividingHook(
            divide=lambda x_TI: (x_TI.float() / divisors).to(x_TI.dtype),
            round=input_hook(inner, place) if inner.kind else None,
        )

    def tap(x_TI: Tensor) -> Tensor:
        return rounded_input(
            x_TI,
            rounding.kind,
            scale=rounding.scale,
            smoothing_scale=rounding.columns,
            largest=lambda top: all_max(top, group),
        )

    return tap


def expert_hook(
    by_expert: Mapping[int, InputRounding],
    num_experts: int,
    place: HookLocation,
    device: torch.device,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A hook that rounds rows sorted by expert with the parameters of their expert, without a loop.

    Scales and smoothing scales are selected by row; those of experts without rounding are ones. If
    kinds differ between experts, each kind is computed for all rows.
    """
    if any(r.stays_divided for r in by_expert.values()):
        return _dividing_expert_hook(by_expert, num_experts, place, device)
    kinds: dict[str, list[int]] = defaultdict(list)
    for expert, rounding in by_expert.items():
        kinds[rounding.kind].append(expert)
        tables = []
    for kind, experts in kinds.items():
        scales_E = torch.ones(num_experts, device=device)
        scales_E[experts] = torch.tensor([by_expert[e].scale for e in experts], device=device)
        columns_EI = None
        smoothed = [e for e in experts if by_expert[e].columns is not None]
        if smoothed:
            width = len(by_expert[smoothed[0]].columns)  # type: ignore[arg-type]
            columns_EI = torch.ones(num_experts, width, device=device)
            for e in smoothed:
                columns_EI[e] = by_expert[e].columns  # type: ignore[assignment]
        here_E = torch.zeros(num_experts, dtype=torch.bool, device=device)
        here_E[experts] = True
        tables.append((kind, scales_E, columns_EI, here_E))

    def tap(rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        ids_R = torch.arange(num_experts, device=rows_RI.device).repeat_interleave(
            counts_E, output_size=len(rows_RI)
        )
        out = rows_RI
        for kind, scales_E, columns_EI, here_E in tables:
            scale = scales_E[ids_R].unsqueeze(1)
            columns = None if columns_EI is None else columns_EI[ids_R]
            rounded = rounded_input(
                rows_RI,
                kind,
                scale=scale,
                smoothing_scale=columns,
                largest=lambda top: all_max(top, place.columns),
            )
            if len(by_expert) == num_experts and len(tables) == 1:
                return rounded
            out = torch.where(here_E[ids_R].unsqueeze(1), rounded, out)
        return out

    return tap


def _dividing_expert_hook(
    by_expert: Mapping[int, InputRounding],
    num_experts: int,
    place: HookLocation,
    device: torch.device,
) -> DividingHook:
    """A hook that divides rows by the smoothing scales of their expert, and rounds them then."""
    divisors = {e: r.columns for e, r in by_expert.items() if r.stays_divided}
    width = next(len(c) for c in divisors.values() if c is not None)
    divisors_EI = torch.ones(num_experts, width, device=device)
    for e, columns in divisors.items():
        if columns is not None:
            divisors_EI[e] = columns
    inner = {
        e: replace(r, columns=None, stays_divided=False) if r.stays_divided else r
        for e, r in by_expert.items()
    }
    rounded = {e: r for e, r in inner.items() if r.kind}

    def divide(rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        rows_divisors = divisors_EI.repeat_interleave(counts_E, 0, output_size=len(rows_RI))
        return (rows_RI.float() / rows_divisors).to(rows_RI.dtype)

    return DividingHook(
        divide=divide,
        round=expert_hook(rounded, num_experts, place, device) if rounded else None,
    )
