"""Treatments: all that was decided about each weight before a byte of it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.quant.recipes.formats import RecipeFormat

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQParams:
    """How one weight `[out, in]` is packed, and what is known about its inputs.

    The weight is multiplied by `columns` `[in]` (None: ones), then clipped to and scaled by `amax`,
    in the shape of the packing's scales before they are turned into scales (`[]`, `[out]`,
    `[out, in/group]`, `[out/block, in/block]`; None: the largest magnitudes of the weight itself
    after `columns`), then rounded. `second_amax` is the one of the whole tensor under formats with
    two levels of scales, where siblings share it (0: the weight's own). `codes` int8 `[out, in]`
    are the integers chosen for it where they are not the nearest ones (GPTQ).

    Inputs are divided by `columns`: by the norm before them, whose factors are in
    `Settlement.norms`, or, with `stores_columns`, by the engine, from `pre_quant_scale` stored as
    `1 / columns`. `input_amax` is the amax of inputs after that (0: the format needs none).
    """

    module: str
    format: RecipeFormat
    smoothing_scale: Floats | None = None
    stores_pre_quant_scale: bool = False
    amax: Floats | None = None
    global_amax: float = 0.0
    codes: NDArray[np.int8] | None = None
    input_amax: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheQParams:
    """The KV cache of a layer: largest magnitudes of keys (after rotation) and values."""

    module: str
    format: RecipeFormat
    key_amax: float
    value_amax: float


@dataclass(slots=True, kw_only=True)
class QParams:
    """What becomes of a whole model, by canonical names.

    `norms` are factors `[hidden]` that the outputs of a norm are divided by, its weight and bias
    are therefore (`(1 + w) / f - 1` where gammas are stored around zero). `notes` are for people:
    what was filled in, left out, or clipped.
    """

    weights: dict[str, WeightQParams] = field(default_factory=dict)
    kv_caches: dict[str, KVCacheQParams] = field(default_factory=dict)
    norm_scales: dict[str, Floats] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def update(self, part: QParams) -> None:
        """Take over what another part of the model was given."""
        self.weights |= part.weights
        self.kv_caches |= part.kv_caches
        self.norm_scales |= part.norm_scales
        self.notes += [n for n in part.notes if n not in self.notes]
