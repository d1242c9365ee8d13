"""Treatments: all that was decided about each weight before a byte of it is packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.quant.recipes.formats import Format

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
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
    format: Format
    columns: Floats | None = None
    stores_columns: bool = False
    amax: Floats | None = None
    second_amax: float = 0.0
    codes: NDArray[np.int8] | None = None
    input_amax: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV cache of a layer: largest magnitudes of keys (after rotation) and values."""

    module: str
    format: Format
    key_amax: float
    value_amax: float


@dataclass(slots=True, kw_only=True)
class Settlement:
    """What becomes of a whole model, by canonical names.

    `norms` are factors `[hidden]` that the outputs of a norm are divided by, its weight and bias
    are therefore (`(1 + w) / f - 1` where gammas are stored around zero). `notes` are for people:
    what was filled in, left out, or clipped.
    """

    treatments: dict[str, Treatment] = field(default_factory=dict)
    caches: dict[str, Cache] = field(default_factory=dict)
    norms: dict[str, Floats] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Settlement) -> None:
        """Take over what another part of the model was given."""
        self.treatments |= other.treatments
        self.caches |= other.caches
        self.norms |= other.norms
        self.notes += [n for n in other.notes if n not in self.notes]


PACKINGS: Mapping[str, str] = {
    "FP8": "fp8:tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8:channel",
    "FP8_PB_WO": "fp8:128x128",
    "W8A8_SQ_PER_CHANNEL": "int8:channel",
    "W8A16": "int8:channel",
    "W4A16_AWQ": "int4rows:{group}",
    "W4A8_AWQ": "int4rows:{group}",
    "MXFP8": "mxfp8:32",
    "MXFP4": "mxfp4:32",
    "W4A8_MXFP4_FP8": "mxfp4:32",
    "NVFP4": "nvfp4:{group}",
    "W4A16_NVFP4": "nvfp4:{group}",
    "W4A8_NVFP4_FP8": "nvfp4:{group}",
}
"""How the codes of each format lie, in the words of `megtool.number_formats.layout`."""

INPUTS: Mapping[str, str] = {
    "FP8": "fp8:tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8:token",
    "W8A8_SQ_PER_CHANNEL": "int8:tensor",
    "W4A8_AWQ": "fp8:tensor",
    "MXFP8": "mxfp8:32",
    "MXFP4": "mxfp4:32",
    "W4A8_MXFP4_FP8": "fp8:token",
    "NVFP4": "nvfp4:16",
    "W4A8_NVFP4_FP8": "fp8:tensor",
}
"""How engines round the inputs of a format, where they do: what has a scale that comes from
calibration (`tensor`), or as they come (`token`, groups; NVFP4's first level alone)."""


def packing_of(format: Format) -> str:
    """The packing of a format's codes, as `int4rows:128`."""
    return PACKINGS[format.algo].format(group=format.group_size)
