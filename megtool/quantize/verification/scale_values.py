"""Compare stored scales of inputs, KV caches and smoothing with the parameters of calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megtool.dtypes import dtype
from megtool.errors import CalibrationError
from megtool.lint.folder_view import FolderView
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import (
    compute_global_scale,
    has_global_scale,
    list_kv_scale_specs,
)
from megtool.quant.qparams import Floats, QParams, WeightQParams
from megtool.quant.recipes.formats import INPUT_PACKINGS
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import ModuleInfo, find_fused_name
from megtool.quantize.verification.weight_error import FOLDED_SLACK, SLACK, ErrorSums, WeightPair
from megtool.report.finding import Finding, error
from megtool.transport.constant_feed import round_to_dtype

_CACHE = "keys and values are clipped, or rounded more than necessary, in every engine"
_SECOND = "engines that convert the codes to FP8 clip them or scale them wrongly"

_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "nvfp4": 6.0 * 448.0}


def check_stored_qparams(
    folder: FolderView,
    decisions: Sequence[Decision],
    names: Mapping[str, str],
    qparams: QParams,
) -> Iterator[Finding]:
    """Compare stored scales with the calibrated ones; other checks report missing tensors."""
    by_stored_name = _group_by_stored_name(decisions, names, qparams)
    yield from _check_kv_caches(folder, decisions, qparams)
    for d in decisions:
        params = qparams.weights.get(d.module.name)
        tensors = folder.modules.get(names.get(d.module.name, ""), {})
        if params is None or d.format is None or not d.format.algo:
            continue
        if (scale := tensors.get("input_scale")) is not None and params.input_amax > 0:
            members = by_stored_name[names[d.module.name]]
            amax = max(t.input_amax for t in members)
            yield from _check_input_scale(
                params, amax, float(folder.read_values(scale).reshape(-1)[0])
            )
        if (second := tensors.get("weight_scale_2")) is not None:
            amaxes = [t.global_amax for t in by_stored_name[names[d.module.name]]]
            if min(amaxes) > 0 and has_global_scale(d.format.algo):
                value = float(folder.read_values(second).reshape(-1)[0])
                yield from _check_global_scale(params, max(amaxes), value)
        stored = tensors.get("pre_quant_scale")
        if params.stores_pre_quant_scale and params.smoothing_scale is not None:
            if stored is None:
                yield error(
                    "pre-quant-scale",
                    params.module,
                    "its columns were scaled, but pre_quant_scale is missing",
                    "inputs are not divided by the smoothing scales: outputs are wrong in every "
                    "engine",
                )
            else:
                kind = dtype(stored.dtype)
                inverse = np.float32(1) / params.smoothing_scale.astype(np.float32)
                rounded = single(round_to_dtype(inverse, kind), kind.name)
                yield from _check_pre_quant_scale(
                    params.module, rounded, folder.read_values(stored).reshape(-1)
                )
        elif stored is not None:
            yield error(
                "pre-quant-scale",
                params.module,
                "has a pre_quant_scale, but the engine should not scale its columns",
                "inputs are scaled twice, or without need",
            )


def _group_by_stored_name(
    decisions: Sequence[Decision], names: Mapping[str, str], qparams: QParams
) -> dict[str, list[WeightQParams]]:
    """Quantization parameters by stored module; several if it has fused weights."""
    out: dict[str, list[WeightQParams]] = defaultdict(list)
    for d in decisions:
        params = qparams.weights.get(d.module.name)
        if params is not None and d.module.name in names:
            out[names[d.module.name]].append(params)
    return out


def _check_kv_caches(
    folder: FolderView, decisions: Sequence[Decision], qparams: QParams
) -> Iterator[Finding]:
    """Check the scales of keys and values, which are float32 scalars."""
    for d in decisions:
        cache = qparams.kv_caches.get(d.module.name)
        if cache is None or d.format is None or not d.module.names_in("hf"):
            continue
        try:
            specs = list_kv_scale_specs(d.module.names_in("hf")[0], cache)
        except CalibrationError as e:
            yield error("kv-scale", d.module.name, e.message, _CACHE)
            continue
        for spec in specs:
            last = spec.tensor.name.rpartition(".")[2]
            stored = folder.tensors.get(spec.tensor.name)
            if stored is None or spec.value is None:
                continue  # the check of config files reports it
            if (stored.shape, stored.dtype) != ((), "float32"):
                text = f"{last} is {stored.dtype} {list(stored.shape)}, not a float32 scalar"
                yield error("shape", d.module.name, text, "engines expect a scalar")
                continue
            value, expected = float(folder.read_values(stored)), float(spec.value)
            if not abs(value - expected) <= 1e-6 * expected:
                text = f"{last} is {value:.6g}, but calibration has {expected:.6g}"
                yield error("kv-scale", d.module.name, text, _CACHE)


def _check_global_scale(params: WeightQParams, amax: float, stored: float) -> Iterator[Finding]:
    expected = float(compute_global_scale(params.format.algo, amax))
    if stored != expected:
        text = f"weight_scale_2 is {stored:.6g}, but calibration has {expected:.6g}"
        yield error("weight-scale-2", params.module, text, _SECOND)


def read_global_scales(folder: FolderView, names: Mapping[str, str]) -> dict[str, float]:
    """Read the `weight_scale_2` of modules that have one, by canonical name."""
    out: dict[str, float] = {}
    for name, stored in names.items():
        tensor = folder.modules.get(stored, {}).get("weight_scale_2")
        if tensor is not None and tensor.shape == ():
            out[name] = float(folder.read_values(tensor))
    return out


def check_global_scales(
    weights: Sequence[WeightPair],
    modules: Sequence[ModuleInfo],
    sums: Mapping[str, ErrorSums],
    qparams: QParams,
    stored: Mapping[str, float],
) -> Iterator[Finding]:
    """Check global scales that follow from the weights and do not scale any code.

    Engines use such a scale to convert codes to FP8. Decoded weights do not depend on it, so it is
    compared with the amax of the weights that engines run as one.
    """
    modules_by_name = {m.name: m for m in modules}
    groups: dict[str, list[WeightPair]] = defaultdict(list)
    for w in weights:
        name = w.name.removesuffix(".weight")
        params = qparams.weights.get(name)
        if params is None or params.format.algo != "W4A8_AWQ" or params.global_amax:
            continue
        if name in modules_by_name and name in stored:
            groups[find_fused_name(modules_by_name[name])].append(w)
    for members in groups.values():
        amax = max(sums[w.name].largest for w in members)
        expected = float(compute_global_scale("W4A8_AWQ", amax))
        tolerance = SLACK if all(w.input_factors is None for w in members) else FOLDED_SLACK
        for w in members:
            name = w.name.removesuffix(".weight")
            if not abs(stored[name] - expected) <= tolerance * expected:
                text = f"weight_scale_2 is {stored[name]:.6g}, but its weight needs {expected:.6g}"
                yield error("weight-scale-2", name, text, _SECOND)


def _check_input_scale(params: WeightQParams, amax: float, stored: float) -> Iterator[Finding]:
    kind = INPUT_PACKINGS.get(params.format.algo, "").partition(":")[0]
    if kind not in _LARGEST:
        return
    expected = amax / _LARGEST[kind]
    if not abs(stored - expected) <= 1e-5 * expected:
        yield error(
            "input-scale",
            params.module,
            f"input_scale is {stored:.6g}, but calibration has {expected:.6g}",
            "inputs are clipped, or rounded more than necessary, in every engine",
        )


def _check_pre_quant_scale(module: str, expected: Floats, stored: Floats) -> Iterator[Finding]:
    if stored.shape != expected.shape:
        return  # the check of shapes reports it
    differs = stored != expected
    if differs.any():
        column = int(differs.argmax())
        yield error(
            "columns",
            module,
            f"pre_quant_scale of {int(differs.sum()):,} of {differs.size:,} columns differs from "
            f"calibration: column {column} is {stored[column]:.6g}, not {expected[column]:.6g}",
            "inputs of these columns are scaled wrongly in every engine",
        )
