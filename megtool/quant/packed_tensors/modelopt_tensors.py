"""The tensors of a quantized module, as in ModelOpt's unified Hugging Face export.

Names extend the module's Hugging Face name, as engines expect: `weight`, `weight_scale`,
`weight_scale_2`, `input_scale`, `pre_quant_scale`, and for SVDQuant's matrices
`weight_quantizer._svdquant_lora_a` and `_b`; a KV cache has `k_proj.k_scale` and `v_proj.v_scale`.
Single scales have no dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import CalibrationError
from megtool.formats.safetensors.quantized_parts import LOW_RANK_SUFFIXES
from megtool.number_formats.decode import CODES, LOW_RANK_DOWN, LOW_RANK_UP, SCALE, SCALE_2
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.scales import modelopt_scale, modelopt_second
from megtool.number_formats.small_floats import single
from megtool.quant.qparams import Floats, KVCacheQParams, LowRankBranch, WeightQParams
from megtool.quant.recipes.formats import INPUT_PACKINGS, RecipeFormat, packing_of
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.constant_feed import round_to_dtype

NAMES: Mapping[str, str] = {CODES: "weight", SCALE: "weight_scale", SCALE_2: "weight_scale_2"}
INPUT_SCALE = "input_scale"
COLUMNS_SCALE = "pre_quant_scale"

E4M3, INT8 = 448.0, 127.0

GLOBAL_SCALE_DIVISORS: Mapping[str, float] = {"W4A8_AWQ": E4M3, "W4A8_NVFP4_FP8": E4M3}
"""Divisors of the amax of the entire tensor for `weight_scale_2`, if not NVFP4's 6 * 448: engines
convert these codes to FP8 before they multiply (modelopt `export/quant_utils.py`
get_weight_scaling_factor_2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A stored tensor of a module. `value` is its content if that is known beforehand; otherwise
    `part` says which codes or scales of the weight it has."""

    tensor: GlobalTensor
    part: PackedPart | None = None
    value: NDArray[np.generic] | None = None


def needs_amax(qparams: WeightQParams) -> bool:
    """Whether the amax of the entire weight (after smoothing) must be known first."""
    algo = qparams.format.algo
    if algo == "FP8":
        return qparams.amax is None
    return has_global_scale(algo) and not qparams.global_amax


def has_global_scale(algo: str) -> bool:
    """Whether a format has a `weight_scale_2`."""
    return algo in GLOBAL_SCALE_DIVISORS or "NVFP4" in algo


def compute_global_scale(algo: str, amax: float) -> NDArray[np.float32]:
    """Compute `weight_scale_2` from the amax of the entire weight."""
    tensor_amax = np.asarray(amax, np.float32)
    if algo in GLOBAL_SCALE_DIVISORS:
        return np.asarray(modelopt_scale(tensor_amax, GLOBAL_SCALE_DIVISORS[algo]), np.float32)
    return np.asarray(modelopt_second(tensor_amax), np.float32)


def compute_input_scale(qparams: WeightQParams) -> NDArray[np.float32] | None:
    """Compute `input_scale`; None if the format has none.

    Raises:
        CalibrationError: the amax of the inputs is unknown.
    """
    form = qparams.format
    if not form.number.calibrates:
        return None
    amax = np.asarray(qparams.input_amax, np.float32)
    if not (np.isfinite(amax) and amax > 0):
        raise CalibrationError(
            f"{form.algo} needs a static input scale, but the calibrated input amax of "
            f"{qparams.module} is {qparams.input_amax:g}",
            hint="calibrate with data, or choose a format with dynamic input scales",
        )
    if INPUT_PACKINGS[form.algo].startswith("nvfp4"):
        return np.asarray(modelopt_second(amax), np.float32)
    largest = INT8 if INPUT_PACKINGS[form.algo].startswith("int8") else E4M3
    return np.asarray(modelopt_scale(amax, largest), np.float32)


def list_module_specs(
    name: str,
    shape: tuple[int, int],
    form: RecipeFormat,
    dtype: DType,
    *,
    amax: float = 0.0,
    inputs: NDArray[np.float32] | None = None,
    columns: Floats | None = None,
    branch: LowRankBranch | None = None,
) -> list[QuantizedTensor]:
    """List the tensors of the module `name` with a weight of `shape`, codes first.

    `amax` is that of the entire weight, if the format needs it; `inputs` is the `input_scale`;
    `columns` are the smoothing scales, if they are stored, in `dtype`, as is `branch`.

    Raises:
        UsageError: groups or blocks do not divide the weight, or rows cannot be paired.
        CalibrationError: a number of the branch is too large for `dtype`.
    """
    packing = packing_of(form)
    out: list[QuantizedTensor] = []
    for part in layout(packing, shape):
        value: NDArray[np.generic] | None = None
        if part.role == SCALE_2:
            value = compute_global_scale(form.algo, amax)
        elif part.role == SCALE and not part.shape:
            value = np.asarray(modelopt_scale(np.asarray(amax, np.float32), E4M3), np.float32)
        kind = named_dtype(stored_type(part.dtype))
        stored_tensor = GlobalTensor(
            name=f"{name}.{NAMES[part.role]}", shape=part.shape, dtype=kind
        )
        out.append(QuantizedTensor(tensor=stored_tensor, part=part, value=value))
    if form.algo in GLOBAL_SCALE_DIVISORS and all(h.part and h.part.role != SCALE_2 for h in out):
        out.append(
            _constant_spec(f"{name}.{NAMES[SCALE_2]}", compute_global_scale(form.algo, amax))
        )
    if inputs is not None:
        out.append(_constant_spec(f"{name}.{INPUT_SCALE}", inputs))
    if columns is not None:
        factors = round_to_dtype(np.float32(1) / columns.astype(np.float32), dtype)
        tensor = GlobalTensor(name=f"{name}.{COLUMNS_SCALE}", shape=columns.shape, dtype=dtype)
        out.append(QuantizedTensor(tensor=tensor, value=factors))
    return out + ([] if branch is None else _branch_specs(name, branch, dtype))


def _branch_specs(name: str, branch: LowRankBranch, dtype: DType) -> list[QuantizedTensor]:
    """SVDQuant's matrices, in the dtype of the weight."""
    out = []
    for role, matrix in ((LOW_RANK_DOWN, branch.down), (LOW_RANK_UP, branch.up)):
        value = round_to_dtype(matrix, dtype)
        tensor = GlobalTensor(
            name=f"{name}.{LOW_RANK_SUFFIXES[role][0]}", shape=matrix.shape, dtype=dtype
        )
        if not np.isfinite(single(value, dtype.name)).all():
            raise CalibrationError(
                f"the low-rank matrices of {name} have numbers that {dtype.name} cannot hold",
                tensor=tensor.name,
                hint="convert the model to bfloat16 first (megtool reshard --dtype bfloat16)",
            )
        out.append(QuantizedTensor(tensor=tensor, value=value))
    return out


def stored_type(dtype: str) -> str:
    """The dtype that a part is stored as: loaders of MX formats expect exponents as bytes."""
    return "uint8" if dtype == "float8_e8m0fnu" else dtype


def list_kv_scale_specs(attention: str, cache: KVCacheQParams) -> list[QuantizedTensor]:
    """List the scales of a layer's keys and values, under ModelOpt's names of its attention.

    `self_attn.k_proj.k_scale` and `self_attn.v_proj.v_scale`, without dimensions; folders of
    compressed-tensors have `self_attn.k_scale` and `self_attn.v_scale` of shape [1].
    """
    out = []
    for name, amax in (("k_proj.k_scale", cache.key_amax), ("v_proj.v_scale", cache.value_amax)):
        cache_amax = np.asarray(amax, np.float32)
        if not (np.isfinite(cache_amax) and cache_amax >= 0):
            raise CalibrationError(f"the amax of the KV cache {cache.module} is {amax:g}")
        if cache.format.constant:
            scale = np.ones((), np.float32)
        elif cache.format.kv_algo == "NVFP4":
            scale = np.asarray(modelopt_second(cache_amax), np.float32)
        else:
            scale = np.asarray(modelopt_scale(cache_amax, E4M3), np.float32)
        out.append(_constant_spec(f"{attention}.{name}", scale))
    return out


def _constant_spec(name: str, value: NDArray[np.float32]) -> QuantizedTensor:
    tensor = GlobalTensor(name=name, shape=value.shape, dtype=named_dtype("float32"))
    return QuantizedTensor(tensor=tensor, value=value)
