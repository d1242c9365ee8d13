"""Stored scales of inputs, KV caches and smoothing, compared with the qparams of calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megtool.dtypes import dtype
from megtool.errors import CalibrationError
from megtool.lint.finding import Finding, error
from megtool.lint.folder_view import FolderView
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import caches_of, has_second, second_scale
from megtool.quant.qparams import Floats, QParams, WeightQParams
from megtool.quant.recipes.formats import INPUT_PACKINGS
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import ModuleInfo, find_fused_name
from megtool.quant.verification.weight_error import FOLDED_SLACK, SLACK, ErrorSums, WeightPair
from megtool.reshard.constant_feed import round_to_dtype

_CACHE = "keys and values are cut off, or rounded more than need be, in every engine"
_SECOND = "engines that turn the codes into FP8 cut them off, or multiply by something else"

_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "nvfp4": 6.0 * 448.0}


def check_stored_qparams(
    folder: FolderView,
    decisions: Sequence[Decision],
    names: Mapping[str, str],
    qparams: QParams,
) -> Iterator[Finding]:
    """Where stored values are not those settled; what is missing is told by other checks."""
    by_stored_name = _group_by_stored_name(decisions, names, qparams)
    yield from _check_kv_caches(folder, decisions, qparams)
    for d in decisions:
        treatment = qparams.weights.get(d.module.name)
        tensors = folder.modules.get(names.get(d.module.name, ""), {})
        if treatment is None or d.format is None or not d.format.algo:
            continue
        if (scale := tensors.get("input_scale")) is not None and treatment.input_amax > 0:
            some = by_stored_name[names[d.module.name]]
            amax = max(t.input_amax for t in some)
            yield from _check_input_scale(
                treatment, amax, float(folder.read_values(scale).reshape(-1)[0])
            )
        if (second := tensors.get("weight_scale_2")) is not None:
            tops = [t.global_amax for t in by_stored_name[names[d.module.name]]]
            if min(tops) > 0 and has_second(d.format.algo):
                value = float(folder.read_values(second).reshape(-1)[0])
                yield from _check_global_scale(treatment, max(tops), value)
        stored = tensors.get("pre_quant_scale")
        if treatment.stores_pre_quant_scale and treatment.smoothing_scale is not None:
            if stored is None:
                yield error(
                    "pre-quant-scale",
                    treatment.module,
                    "its columns were scaled, and pre_quant_scale is missing",
                    "inputs are not divided by the factors: outputs are wrong in every engine",
                )
            else:
                kind = dtype(stored.dtype)
                inverse = np.float32(1) / treatment.smoothing_scale.astype(np.float32)
                rounded = single(round_to_dtype(inverse, kind), kind.name)
                yield from _check_pre_quant_scale(
                    treatment.module, rounded, folder.read_values(stored).reshape(-1)
                )
        elif stored is not None:
            yield error(
                "pre-quant-scale",
                treatment.module,
                "has a pre_quant_scale, and its columns were not to be scaled by the engine",
                "inputs are scaled twice, or for nothing",
            )


def _group_by_stored_name(
    decisions: Sequence[Decision], names: Mapping[str, str], qparams: QParams
) -> dict[str, list[WeightQParams]]:
    """Treatments by stored module: several where a family has them in one tensor."""
    out: dict[str, list[WeightQParams]] = defaultdict(list)
    for d in decisions:
        treatment = qparams.weights.get(d.module.name)
        if treatment is not None and d.module.name in names:
            out[names[d.module.name]].append(treatment)
    return out


def _check_kv_caches(
    folder: FolderView, decisions: Sequence[Decision], qparams: QParams
) -> Iterator[Finding]:
    """Scales of keys and values, each one float32."""
    for d in decisions:
        cache = qparams.kv_caches.get(d.module.name)
        if cache is None or d.format is None or not d.module.names_in("hf"):
            continue
        try:
            due = caches_of(d.module.names_in("hf")[0], cache)
        except CalibrationError as e:
            yield error("kv-scale", d.module.name, e.message, _CACHE)
            continue
        for constant in due:
            last = constant.tensor.name.rpartition(".")[2]
            stored = folder.tensors.get(constant.tensor.name)
            if stored is None or constant.value is None:
                continue  # told where config files are held against tensors
            if (stored.shape, stored.dtype) != ((), "float32"):
                text = f"{last} is {stored.dtype} {list(stored.shape)}, not one float32"
                yield error("shape", d.module.name, text, "engines expect a scalar")
                continue
            value, expected = float(folder.read_values(stored)), float(constant.value)
            if not abs(value - expected) <= 1e-6 * expected:
                text = f"{last} is {value:.6g}, and calibration settled {expected:.6g}"
                yield error("kv-scale", d.module.name, text, _CACHE)


def _check_global_scale(treatment: WeightQParams, amax: float, stored: float) -> Iterator[Finding]:
    expected = float(second_scale(treatment.format.algo, amax))
    if stored != expected:
        text = f"weight_scale_2 is {stored:.6g}, and calibration settled {expected:.6g}"
        yield error("weight-scale-2", treatment.module, text, _SECOND)


def read_global_scales(folder: FolderView, names: Mapping[str, str]) -> dict[str, float]:
    """`weight_scale_2` of modules that have one, by canonical name."""
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
    """Second scales that no code is multiplied by, where they come of the weights themselves.

    Such a scale is for engines that turn codes into FP8: nothing in a decoded weight depends on
    it, so that it is held against the largest magnitude of what is run as one.
    """
    of = {m.name: m for m in modules}
    groups: dict[str, list[WeightPair]] = defaultdict(list)
    for w in weights:
        name = w.name.removesuffix(".weight")
        treatment = qparams.weights.get(name)
        if treatment is None or treatment.format.algo != "W4A8_AWQ" or treatment.global_amax:
            continue
        if name in of and name in stored:
            groups[find_fused_name(of[name])].append(w)
    for some in groups.values():
        amax = max(sums[w.name].largest for w in some)
        expected = float(second_scale("W4A8_AWQ", amax))
        near = SLACK if all(w.input_factors is None for w in some) else FOLDED_SLACK
        for w in some:
            name = w.name.removesuffix(".weight")
            if not abs(stored[name] - expected) <= near * expected:
                text = (
                    f"weight_scale_2 is {stored[name]:.6g}, and its weight asks for {expected:.6g}"
                )
                yield error("weight-scale-2", name, text, _SECOND)


def _check_input_scale(treatment: WeightQParams, amax: float, stored: float) -> Iterator[Finding]:
    kind = INPUT_PACKINGS.get(treatment.format.algo, "").partition(":")[0]
    if kind not in _LARGEST:
        return
    expected = amax / _LARGEST[kind]
    if not abs(stored - expected) <= 1e-5 * expected:
        yield error(
            "input-scale",
            treatment.module,
            f"input_scale is {stored:.6g}, and calibration settled {expected:.6g}",
            "inputs are cut off, or rounded more than need be, in every engine",
        )


def _check_pre_quant_scale(module: str, expected: Floats, stored: Floats) -> Iterator[Finding]:
    if stored.shape != expected.shape:
        return  # told with the other shapes
    off = stored != expected
    if off.any():
        column = int(off.argmax())
        yield error(
            "columns",
            module,
            f"pre_quant_scale of {int(off.sum()):,} of {off.size:,} columns is not what was "
            f"settled: column {column} is {stored[column]:.6g}, not {expected[column]:.6g}",
            "inputs of these columns are scaled wrongly in every engine",
        )
