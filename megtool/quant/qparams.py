"""Quantization parameters of weights, KV caches and norms, solved before any packing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.quant.recipes.formats import RecipeFormat

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankBranch:
    """SVDQuant's matrices `up` `[out, rank]` and `down` `[rank, in]`, of bfloat16 numbers, whose
    product is added to the rounded weight."""

    up: Floats
    down: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQParams:
    """Quantization parameters of one weight `[out, in]` and its inputs.

    The weight is multiplied by `smoothing_scale` `[in]` (None: ones), then clipped to and scaled by
    `amax`, which has the shape of the scales of the packing (`[]`, `[out]`, `[out, in/group]`,
    `[out/block, in/block]`; None: the amax of the weight itself after smoothing), then rounded.
    `global_amax` is the per-tensor amax of formats with two-level scales, shared by fused siblings
    (0: the weight's own). `codes` int8 `[out, in]` are the codes, integers or the bits of
    floats, if they are not the nearest ones (GPTQ), or those of what a `branch` leaves of the
    weight after smoothing.

    Inputs are divided by `smoothing_scale`: by the preceding norm (`QParams.norm_scales`) or, with
    `stores_pre_quant_scale`, by the engine, which reads `pre_quant_scale = 1 / smoothing_scale`.
    `input_amax` is the amax of inputs after that (0: the format needs none). `is_smoothed`: the
    weight is stored multiplied by `smoothing_scale` already, as ModelOpt stores it.
    """

    module: str
    format: RecipeFormat
    smoothing_scale: Floats | None = None
    stores_pre_quant_scale: bool = False
    amax: Floats | None = None
    global_amax: float = 0.0
    codes: NDArray[np.int8] | None = None
    input_amax: float = 0.0
    is_smoothed: bool = False
    branch: LowRankBranch | None = None

    @property
    def weight_factors(self) -> Floats | None:
        """What the stored weight is multiplied by before it is rounded (None: ones)."""
        return None if self.is_smoothed else self.smoothing_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheQParams:
    """Quantization parameters of one layer's KV cache: amax of keys (after RoPE) and of values."""

    module: str
    format: RecipeFormat
    key_amax: float
    value_amax: float


@dataclass(slots=True, kw_only=True)
class QParams:
    """Quantization parameters of a model, by canonical module names.

    `norm_scales` are the smoothing scales `[hidden]` folded into norms: the weight and bias of the
    norm are divided by them (`(1 + w) / s - 1` for zero-centered weights). `notes` are messages for
    the report.
    """

    weights: dict[str, WeightQParams] = field(default_factory=dict)
    kv_caches: dict[str, KVCacheQParams] = field(default_factory=dict)
    norm_scales: dict[str, Floats] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def update(self, part: QParams) -> None:
        """Add the parameters of another part of the model."""
        self.weights |= part.weights
        self.kv_caches |= part.kv_caches
        self.norm_scales |= part.norm_scales
        self.notes += [n for n in part.notes if n not in self.notes]
