"""The tensors of a quantized module, as in ModelOpt's unified Hugging Face export.

Names stand on the module's Hugging Face name, as the loaders of engines look for them: `weight`,
`weight_scale`, `weight_scale_2`, `input_scale`, `pre_quant_scale`; a KV cache has
`k_proj.k_scale` and `v_proj.v_scale`. Single scales have no dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import CalibrationError
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.scales import modelopt_scale, modelopt_second
from megtool.quant.qparams import Floats, KVCacheQParams, WeightQParams
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.reshard.constant_feed import round_to_dtype
from megtool.tensors.sharded import GlobalTensor

NAMES: Mapping[str, str] = {CODES: "weight", SCALE: "weight_scale", SCALE_2: "weight_scale_2"}
INPUT_SCALE = "input_scale"
COLUMNS_SCALE = "pre_quant_scale"

E4M3, INT8 = 448.0, 127.0

SECONDS: Mapping[str, float] = {"W4A8_AWQ": E4M3, "W4A8_NVFP4_FP8": E4M3}
"""What the amax of the whole tensor is divided by for `weight_scale_2`, where it is not NVFP4's
6 * 448: engines make FP8 of these codes before they multiply (modelopt `export/quant_utils.py`
get_weight_scaling_factor_2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensorSpec:
    """One stored tensor of a module; `value` is what it holds where that is known beforehand, else
    it is the codes or scales that come of the weight (`part`)."""

    tensor: GlobalTensor
    part: PackedPart | None = None
    value: NDArray[np.generic] | None = None


def needs_amax(treatment: WeightQParams) -> bool:
    """Whether the amax of the entire weight (after smoothing) must be known first."""
    algo = treatment.format.algo
    if algo == "FP8":
        return treatment.amax is None
    return has_second(algo) and not treatment.global_amax


def has_second(algo: str) -> bool:
    """There is a `weight_scale_2`."""
    return algo in SECONDS or "NVFP4" in algo


def second_scale(algo: str, amax: float) -> NDArray[np.float32]:
    """`weight_scale_2`, from the amax of the entire weight."""
    top = np.asarray(amax, np.float32)
    if algo in SECONDS:
        return np.asarray(modelopt_scale(top, SECONDS[algo]), np.float32)
    return np.asarray(modelopt_second(top), np.float32)


def input_scale(treatment: WeightQParams) -> NDArray[np.float32] | None:
    """`input_scale`, None where a format has none.

    Raises:
        CalibrationError: it has one, and nothing is known about inputs.
    """
    form = treatment.format
    if not form.number.calibrates:
        return None
    amax = np.asarray(treatment.input_amax, np.float32)
    if not (np.isfinite(amax) and amax > 0):
        raise CalibrationError(
            f"{form.algo} scales inputs by a number that calibration finds, and of "
            f"{treatment.module} it has found {treatment.input_amax:g}",
            hint="calibrate with data, or take a format that scales inputs as they come",
        )
    if INPUT_PACKINGS[form.algo].startswith("nvfp4"):
        return np.asarray(modelopt_second(amax), np.float32)
    largest = INT8 if INPUT_PACKINGS[form.algo].startswith("int8") else E4M3
    return np.asarray(modelopt_scale(amax, largest), np.float32)


def tensor_specs(
    name: str,
    shape: tuple[int, int],
    form: RecipeFormat,
    dtype: DType,
    *,
    amax: float = 0.0,
    inputs: NDArray[np.float32] | None = None,
    columns: Floats | None = None,
) -> list[QuantizedTensorSpec]:
    """The tensors of the module `name` whose weight is of `shape`, codes first.

    `amax` is that of the whole weight, where the format needs it; `inputs` the `input_scale`;
    `columns` the factors that inputs are divided by, if these are to be stored, in `dtype`.

    Raises:
        UsageError: groups or blocks do not divide the weight, or rows cannot be paired.
    """
    packing = packing_of(form)
    out: list[QuantizedTensorSpec] = []
    for part in layout(packing, shape):
        value: NDArray[np.generic] | None = None
        if part.role == SCALE_2:
            value = second_scale(form.algo, amax)
        elif part.role == SCALE and not part.shape:
            value = np.asarray(modelopt_scale(np.asarray(amax, np.float32), E4M3), np.float32)
        kind = named_dtype(stored_type(part.dtype))
        stored_tensor = GlobalTensor(
            name=f"{name}.{NAMES[part.role]}", shape=part.shape, dtype=kind
        )
        out.append(QuantizedTensorSpec(tensor=stored_tensor, part=part, value=value))
    if form.algo in SECONDS and all(h.part and h.part.role != SCALE_2 for h in out):
        out.append(_constant_spec(f"{name}.{NAMES[SCALE_2]}", second_scale(form.algo, amax)))
    if inputs is not None:
        out.append(_constant_spec(f"{name}.{INPUT_SCALE}", inputs))
    if columns is not None:
        factors = round_to_dtype(np.float32(1) / columns.astype(np.float32), dtype)
        tensor = GlobalTensor(name=f"{name}.{COLUMNS_SCALE}", shape=columns.shape, dtype=dtype)
        out.append(QuantizedTensorSpec(tensor=tensor, value=factors))
    return out


def stored_type(dtype: str) -> str:
    """The type that a part is stored as: powers of two are bytes to the loaders of MX formats."""
    return "uint8" if dtype == "float8_e8m0fnu" else dtype


def caches_of(attention: str, cache: KVCacheQParams) -> list[QuantizedTensorSpec]:
    """The scales of a layer's keys and values, on the name of its attention."""
    out = []
    for name, amax in (("k_proj.k_scale", cache.key_amax), ("v_proj.v_scale", cache.value_amax)):
        top = np.asarray(amax, np.float32)
        if not (np.isfinite(top) and top >= 0):
            raise CalibrationError(f"the amax of the cache {cache.module} is {amax:g}")
        if cache.format.constant:
            scale = np.ones((), np.float32)
        elif cache.format.kv_algo == "NVFP4":
            scale = np.asarray(modelopt_second(top), np.float32)
        else:
            scale = np.asarray(modelopt_scale(top, E4M3), np.float32)
        out.append(_constant_spec(f"{attention}.{name}", scale))
    return out


def _constant_spec(name: str, value: NDArray[np.float32]) -> QuantizedTensorSpec:
    tensor = GlobalTensor(name=name, shape=value.shape, dtype=named_dtype("float32"))
    return QuantizedTensorSpec(tensor=tensor, value=value)
