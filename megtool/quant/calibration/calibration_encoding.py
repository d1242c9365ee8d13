"""Encoding of statistics and quantization parameters as arrays and JSON, and checked decoding."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from megtool.quant.calibration.calibration_file_io import Array, Arrays
from megtool.quant.qparams import KVCacheQParams, LowRankBranch, QParams, WeightQParams
from megtool.quant.recipes.formats import FORMATS, KV_BITS, BlockScales, RecipeFormat
from megtool.quant.statistics.site_statistics import BINS, ActivationStatistics

_SUMS = (("amax", "float32"), ("abs_sum", "float64"), ("square_sum", "float64"))


def encode_statistics(
    statistics: Mapping[str, ActivationStatistics], arrays: dict[str, Array]
) -> dict[str, Any]:
    """Encode statistics by activation site as JSON data; their arrays are added to `arrays`.

    Of a histogram, the bins from the first to the last nonzero one are stored. Gram matrices and
    samples are not stored.
    """
    out = {}
    for name, s in statistics.items():
        for key, _ in _SUMS:
            arrays[f"statistics/{name}/{key}"] = getattr(s, key)
        used = np.flatnonzero(s.histogram[1:])
        low, high = (int(used[0]) + 1, int(used[-1]) + 2) if len(used) else (1, 1)
        arrays[f"statistics/{name}/histogram"] = s.histogram[low:high]
        out[name] = {"num_tokens": s.num_tokens, "low": low, "zeros": int(s.histogram[0])}
    return out


def decode_statistics(facts: Mapping[str, Any], arrays: Arrays) -> dict[str, ActivationStatistics]:
    """Decode statistics.

    Raises:
        KeyError, TypeError, ValueError: the data is invalid.
    """
    out = {}
    for name, entry in facts.items():
        sums = {k: _array(arrays, f"statistics/{name}/{k}", kind) for k, kind in _SUMS}
        part = _array(arrays, f"statistics/{name}/histogram", "int64")
        low, tokens = _count(entry["low"]), _count(entry["num_tokens"])
        if part.ndim != 1 or not 1 <= low <= BINS - len(part) or (part < 0).any():
            raise ValueError(f"the histogram of {name!r} is invalid")
        for key, array in sums.items():
            if array.ndim != 1 or array.shape != sums["amax"].shape:
                raise ValueError(f"{key} of {name!r} has shape {list(array.shape)}")
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise ValueError(f"{key} of {name!r} holds negative or non-finite values")
        histogram = np.zeros(BINS, np.int64)
        histogram[0], histogram[low : low + len(part)] = _count(entry["zeros"]), part
        # Small, and used in computations: copied out of the mapped file.
        out[name] = ActivationStatistics(
            num_tokens=tokens, histogram=histogram, **{k: np.array(a) for k, a in sums.items()}
        )
    return out


def encode_qparams(qparams: QParams, arrays: dict[str, Array]) -> dict[str, Any]:
    """Encode quantization parameters as JSON data; their arrays are added to `arrays`."""
    formats: dict[RecipeFormat, int] = {}
    weights, kv_caches = {}, {}
    for name, t in qparams.weights.items():
        for key in ("smoothing_scale", "amax", "codes"):
            if (array := getattr(t, key)) is not None:
                arrays[f"weights/{name}/{key}"] = array
        if t.branch is not None:
            arrays |= {f"weights/{name}/{k}": getattr(t.branch, k) for k in ("up", "down")}
        weights[name] = {
            "format": formats.setdefault(t.format, len(formats)),
            "stores_pre_quant_scale": bool(t.stores_pre_quant_scale),
            "global_amax": float(t.global_amax),
            "input_amax": float(t.input_amax),
        }
    for name, c in qparams.kv_caches.items():
        kv_caches[name] = {
            "format": formats.setdefault(c.format, len(formats)),
            "key_amax": float(c.key_amax),
            "value_amax": float(c.value_amax),
        }
    for name, factors in qparams.norm_scales.items():
        arrays[f"norm_scales/{name}"] = factors
    return {
        "formats": [_encode_format(f) for f in formats],
        "weights": weights,
        "kv_caches": kv_caches,
        "norm_scales": sorted(qparams.norm_scales),
        "notes": list(qparams.notes),
    }


def decode_qparams(facts: Mapping[str, Any], arrays: Arrays) -> QParams:
    """Decode quantization parameters.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the data is invalid.
    """
    formats = [_decode_format(f) for f in facts["formats"]]
    out = QParams(notes=[str(n) for n in facts["notes"]])
    for name, entry in facts["weights"].items():
        prefix = f"weights/{name}"
        codes = _array(arrays, f"{prefix}/codes", "int8", minimum=None)
        scale = _array(arrays, f"{prefix}/smoothing_scale", "float32")
        if scale is not None and (scale.ndim != 1 or not (scale > 0).all()):
            raise ValueError(f"the smoothing scale of {name!r} is not positive")
        if codes is not None and codes.ndim != 2:
            raise ValueError(f"codes of {name!r} have shape {list(codes.shape)}")
        out.weights[name] = WeightQParams(
            module=name,
            format=formats[_count(entry["format"])],
            smoothing_scale=scale,
            stores_pre_quant_scale=entry["stores_pre_quant_scale"] is True,
            amax=_array(arrays, f"{prefix}/amax", "float32"),
            global_amax=_magnitude(entry["global_amax"]),
            codes=codes,
            input_amax=_magnitude(entry["input_amax"]),
            branch=_decode_branch(arrays, prefix),
        )
    for name, entry in facts["kv_caches"].items():
        out.kv_caches[name] = KVCacheQParams(
            module=name,
            format=formats[_count(entry["format"])],
            key_amax=_magnitude(entry["key_amax"]),
            value_amax=_magnitude(entry["value_amax"]),
        )
    for name in facts["norm_scales"]:
        scales = arrays[f"norm_scales/{name}"]
        if scales.ndim != 1 or not (np.isfinite(scales).all() and (scales > 0).all()):
            raise ValueError(f"the norm scale of {name!r} is not finite and positive")
        out.norm_scales[name] = np.array(scales, np.float32)
    return out


def _decode_branch(arrays: Arrays, prefix: str) -> LowRankBranch | None:
    up, down = (_array(arrays, f"{prefix}/{k}", "float32", minimum=-np.inf) for k in ("up", "down"))
    if up is None or down is None:
        return None
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0]:
        raise ValueError(f"{prefix!r} has a branch of {list(up.shape)} and {list(down.shape)}")
    return LowRankBranch(up=np.array(up), down=np.array(down))


def _encode_format(format: RecipeFormat) -> dict[str, Any]:
    values = {f.name: getattr(format, f.name) for f in fields(RecipeFormat)}
    return values | {"choose": list(format.choose)}


def _decode_format(entry: Mapping[str, Any]) -> RecipeFormat:
    for key, kind in (("name", str), ("algo", str), ("kv_algo", str), ("method", str)):
        if not isinstance(entry[key], kind):
            raise TypeError(f"{key} of a format is {entry[key]!r}")
    if bool(entry["algo"]) == bool(entry["kv_algo"]):
        raise ValueError("a format is for modules or for the KV cache")
    if entry["algo"] not in {"", *FORMATS} or entry["kv_algo"] not in {"", *KV_BITS}:
        raise ValueError(f"unknown format {entry['algo'] or entry['kv_algo']!r}")
    return RecipeFormat(
        name=entry["name"],
        algo=entry["algo"],
        kv_algo=entry["kv_algo"],
        choose=tuple(str(c) for c in entry["choose"]),
        group_size=_count(entry["group_size"]),
        bits=_magnitude(entry["bits"]),
        constant=entry["constant"] is True,
        input_amax=_magnitude(entry["input_amax"]),
        method=entry["method"],
        round_twice=entry["round_twice"] is True,
        block_scales=_block_scales(entry.get("block_scales", "")),
        line=_count(entry["line"]),
    )


def _block_scales(value: Any) -> BlockScales:
    """Files of earlier releases have none."""
    if value not in get_args(BlockScales):
        raise ValueError(f"block_scales of a format is {value!r}")
    return cast("BlockScales", value)


def _array(arrays: Arrays, name: str, kind: str, *, minimum: float | None = 0) -> Any:
    """Get an array of a dtype, finite and at least `minimum`; None if it is missing."""
    array = arrays.get(name)
    if array is None:
        if name.startswith("statistics/"):
            raise KeyError(name)
        return None
    if array.dtype.name != kind:
        raise TypeError(f"{name!r} is of {array.dtype.name}")
    if minimum is not None and not (np.isfinite(array).all() and (array >= minimum).all()):
        raise ValueError(f"{name!r} holds negative or non-finite values")
    return array


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _magnitude(value: Any) -> float:
    if type(value) not in (float, int) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{value!r} is not a magnitude")
    return float(value)
