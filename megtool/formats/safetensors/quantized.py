"""Quantized Hugging Face folders: codes and scales as the tensors they represent.

Supported values of `quant_method` in config.json: `fp8` (DeepSeek, and others with blocks of 128 x
128), `fbgemm_fp8`, `mxfp4` (gpt-oss), `compressed-tensors`, `quark` (AMD's FP8, INT8 and MXFP4),
`modelopt` (also if only `hf_quant_config.json` declares it), `gptq` and `awq` (also if only
`quantize_config.json` or `quant_config.json` does), `auto-round`, `bitsandbytes`, and MLX's affine
mode. A weight and its scales become one
tensor under its plain name, of the dtype in the config, with a `packing`; scales of activations and
of the KV cache are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megtool.dtypes import DType, dtype
from megtool.errors import FormatError, listed
from megtool.formats.header_reader import short_repr
from megtool.formats.safetensors.bitsandbytes_weights import find_bitsandbytes
from megtool.formats.safetensors.quantization_config import (
    online_transforms,
    quantization_config,
)
from megtool.formats.safetensors.quantized_parts import (
    AS_STORED_HINT,
    FP8_SCALES,
    MISSING,
    PackedWeight,
    PartFinder,
    QuantGranularity,
    find_byte_codes,
    find_one_byte_codes,
    find_row_pair_codes,
    find_transposed_blocks,
    find_word_codes,
)
from megtool.formats.safetensors.word_weights import (
    find_awq,
    find_gptq,
    find_mlx,
    packed_form,
)
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Extents, IgnoredTensor, StoredPart
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes, widest

_ACTIVATIONS = re.compile(
    r"(?:^|[._])(?:(?:input|output|activation)_(?:scale(?:_ub)?|global_scale|zero_point)"
    r"|[qkv]_(?:scale|zero_point)|[kv]_proj\.[kv]_bias)$"
)
_WHY_ASIDE = "scales of activations and of the KV cache: not needed for decoded weights"
_WHY_SECOND = "scale of a second quantization: not needed for decoded weights"
_ORPHANS = re.compile(
    r"weight_(?:scale(?:_inv|_2)?|packed|global_scale|zero_point|shape|g_idx)$"
    r"|_scale_inv$|_proj_(?:weight_scale(?:_2)?|scales)$"
)
_PART_ORPHANS = re.compile(
    r"(?:^|\.)(?:qweight|qzeros|scales|biases|g_idx|SCB)$"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$"
)
_SCALES = re.compile(r"_(?:scale(?:_inv|_2)?|scales|blocks|packed|global_scale|zero_point|shape)$")


def combine_packed_weights(catalogue: Catalogue) -> Catalogue:
    """The catalogue with every quantized weight as one packed tensor.

    A catalogue whose config names no quantization is returned unchanged. Only headers and the few
    bytes of `weight_shape` are read.

    Raises:
        FormatError: see `find_packed_weights`.
    """
    config = quantization_config(catalogue.metadata)
    return (
        catalogue
        if config is None
        else _combine(catalogue, *find_packed_weights(catalogue, config))
    )


def find_packed_weights(
    catalogue: Catalogue, config: Mapping[str, Any]
) -> tuple[list[PackedWeight], PartFinder]:
    """Every quantized weight with its stored parts, and the finder that knows the used tensors.

    `config` is the result of `quantization_config`. Nothing is decoded.

    Raises:
        FormatError: the method is not supported, a weight lacks its scale or a scale its weight, or
            shapes do not match.
    """
    method = str(config.get("quant_method", "")).lower()
    finder = next((f for name, f in _FINDERS if re.fullmatch(name, method)), None)
    if finder is None:
        finder = _word_finder(config, method, catalogue)
    if finder is None:
        raise FormatError(
            f"quantized by {short_repr(config.get('quant_method'))}, which is not decoded",
            file=catalogue.root,
            hint="known: fp8, fbgemm_fp8, mxfp4, compressed-tensors, modelopt, quark, gptq, awq, "
            f"auto-round, bitsandbytes, MLX (affine); {AS_STORED_HINT}",
            error_id="unsupported-quantization",
        )
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity and sparsity.get("format") != "dense":
        raise FormatError(
            f"its sparsity_config {short_repr(sparsity)} is not decoded",
            file=catalogue.root,
            hint=AS_STORED_HINT,
            error_id="unsupported-quantization",
        )
    if online := online_transforms(config):  # others are in the weights
        raise FormatError(
            f"its transform_config has rotations that engines compute: {listed(online)}",
            file=catalogue.root,
            hint=AS_STORED_HINT,
            error_id="unsupported-quantization",
        )
    if method == "quark":
        _check_quark(catalogue, config)
    stored = PartFinder(catalogue, QuantGranularity.from_config(config))
    weights: list[PackedWeight] = []
    for t in catalogue.tensors:
        if t.name not in stored.used and (weight := finder(stored, t)) is not None:
            weights.append(weight)
    takes_parts = method in DECODED_METHODS
    used_names = stored.used | {f.codes for f in weights}
    for t in catalogue.tensors:
        if t.name not in used_names and not _ACTIVATIONS.search(t.name):
            _check_not_orphan(catalogue, t, _PART_ORPHANS if takes_parts else _ORPHANS)
    return weights, stored


# ---- methods: each takes a stored tensor and returns the weight whose codes it is, or None

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _float8(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """`fp8`, `fbgemm_fp8`: FP8 weights with scales `NAME_scale_inv` or `NAME_scale`, or `scale`
    beside the weight, and FP4 codes in int8, as transformers reads them."""
    if _SCALES.search(t.name) or not t.shape:
        return None
    if t.dtype.name in _FP8:
        return find_one_byte_codes(stored, t, "fp8")
    if t.dtype.name in ("int8", "uint8") and stored.find(t.name, *FP8_SCALES):
        return find_byte_codes(stored, t, t.name)
    return None


def _gpt_oss(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """`mxfp4`: `NAME_blocks` and `NAME_scales`."""
    if t.name.endswith("_blocks") and t.dtype.name == "uint8":
        return find_transposed_blocks(stored, t)
    return None


def _compressed(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """`compressed-tensors`: `weight` of one byte, or `weight_packed`."""
    if t.name.endswith("_packed"):
        if t.dtype.name == "int32":
            return find_word_codes(stored, t)
        return find_byte_codes(stored, t, t.name.removesuffix("_packed"))
    return _one_byte(stored, t)


def _one_byte(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    if not t.shape or _SCALES.search(t.name):
        return None
    if t.dtype.name in _FP8:
        return find_one_byte_codes(stored, t, "fp8")
    if t.dtype.name == "int8":
        return find_one_byte_codes(stored, t, "int8")
    return None


def _modelopt(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """`modelopt`: `weight` of one byte; its shape and the scale's determine the packing."""
    if t.dtype.name != "uint8" or _SCALES.search(t.name) or len(t.shape) < 2:
        return _one_byte(stored, t)
    scale = stored.find(t.name, "_scale")
    if scale is None and not t.name.endswith("weight"):
        return None
    scale = stored.require(t, "_scale")
    if len(scale.shape) == len(t.shape) and scale.shape[-2] == 2 * t.shape[-2]:
        return find_row_pair_codes(stored, t)
    return find_byte_codes(stored, t, t.name)


def _quark(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """`quark`: `weight` of one byte, or of FP4 codes with the first of two columns below."""
    if t.dtype.name == "uint8" and t.name.endswith(".weight") and len(t.shape) > 1:
        return find_byte_codes(stored, t, t.name)
    return _one_byte(stored, t)


_QUARK_DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8", "fp4")


def _check_quark(catalogue: Catalogue, config: Mapping[str, Any]) -> None:
    """Refuse weights that Quark packs or scales in ways that are not decoded.

    Groups of INT8 are stored transposed, INT4 in words in AWQ's order; FP4 needs scales that are
    powers of two. See `quark/torch/utils/pack.py` and `qparamslinear.py` of amd-quark.
    """
    layers = config.get("layer_quant_config")
    types = config.get("layer_type_quant_config")
    sections = [config.get("global_quant_config")]
    sections += [s for d in (layers, types) if isinstance(d, dict) for s in d.values()]
    export = config.get("export")
    if isinstance(export, dict) and export.get("weight_format", "real_quantized") != (
        "real_quantized"
    ):
        return  # plain weights
    for section in sections:
        specs = section.get("weight") if isinstance(section, dict) else None
        for spec in specs if isinstance(specs, list) else [specs]:
            if not isinstance(spec, dict):
                continue
            kind, scheme = str(spec.get("dtype", "")).lower(), spec.get("qscheme")
            is_odd = kind == "int8" and scheme == "per_group"
            is_odd |= kind == "fp4" and spec.get("scale_format") not in ("e8m0", None)
            if kind not in _QUARK_DTYPES or is_odd or isinstance(specs, list):
                raise FormatError(
                    f"Quark's {short_repr(spec.get('dtype'))} weights ({short_repr(scheme)}) are "
                    "not decoded",
                    file=catalogue.root,
                    hint=f"FP8, INT8 by tensor and channel, and MXFP4 are; {AS_STORED_HINT}",
                    error_id="unsupported-quantization",
                )


def _word_finder(
    config: Mapping[str, Any], method: str, catalogue: Catalogue
) -> Callable[[PartFinder, GlobalTensor], PackedWeight | None] | None:
    """Return the finder of weights of GPTQ, AWQ, auto-round or MLX; None for another method."""
    if method == "mlx":
        return lambda stored, t: find_mlx(stored, t, config)
    if method not in WORD_METHODS:
        return None
    form = packed_form(config, catalogue.root)
    if form == "awq":
        return find_awq
    return lambda stored, t: find_gptq(stored, t, form)


WORD_METHODS = ("gptq", "awq", "auto-round", "intel/auto-round")
"""Methods whose weights are integers in words `NAME.qweight`."""

DECODED_METHODS = (*WORD_METHODS, "mlx", "bitsandbytes")
"""Methods whose codes are decoded, and kept in no other form."""

_FINDERS: tuple[tuple[str, Callable[[PartFinder, GlobalTensor], PackedWeight | None]], ...] = (
    ("fp8|fbgemm_fp8", _float8),
    ("mxfp4", _gpt_oss),
    ("bitsandbytes", find_bitsandbytes),
    ("quark", _quark),
    ("compressed-tensors|compressed_tensors", _compressed),
    ("modelopt(?:_fp4|_mixed|_fp8|_mxfp8)?", _modelopt),
)


# ---- the resulting catalogue


def _combine(catalogue: Catalogue, weights: list[PackedWeight], stored: PartFinder) -> Catalogue:
    """The catalogue with packed tensors in place of their codes."""
    kind = _plain_dtype(catalogue)
    by_codes = {f.codes: f for f in weights}
    ignored: list[IgnoredTensor] = []
    tensors: list[GlobalTensor] = []
    rows: list[int] = []
    for row, t in enumerate(catalogue.tensors):
        if f := by_codes.get(t.name):
            tensors.append(GlobalTensor(name=f.name, shape=f.shape, dtype=kind, packing=f.packing))
        elif t.name in stored.requantization_scales:
            ignored.append(IgnoredTensor(name=t.name, reason=_WHY_SECOND, num_bytes=t.num_bytes))
            continue
        elif t.name in stored.used:
            continue
        elif _ACTIVATIONS.search(t.name):
            ignored.append(IgnoredTensor(name=t.name, reason=_WHY_ASIDE, num_bytes=t.num_bytes))
            continue
        else:
            tensors.append(t)
        rows.append(row)
    e, positions = catalogue.extents, np.array(rows, np.int64)
    shapes = padded_shapes(tensors, widest(tensors))
    out = replace(
        catalogue,
        tensors=tensors,
        shards=Shards(
            np.arange(len(tensors), dtype=np.int32),
            Boxes(np.zeros_like(shapes), shapes),
            catalogue.shards.owner[positions],
        ),
        extents=Extents(
            file=e.file[positions], offset=e.offset[positions], length=e.length[positions]
        ),
        packed={f.name: tuple(_locate_parts(catalogue, f)) for f in weights},
        ignored=ignored,
        _index={},
    )
    out.check()
    return out


def _locate_parts(catalogue: Catalogue, f: PackedWeight) -> list[StoredPart]:
    e = catalogue.extents
    return [
        StoredPart(part=part, file=int(e.file[row]), offset=int(e.offset[row]))
        for part, row in ((p, catalogue.index[name]) for p, name in f.parts)
    ]


def _check_not_orphan(catalogue: Catalogue, t: GlobalTensor, orphans: re.Pattern[str]) -> None:
    """Refuse a scale without its weight, or whose weight holds no codes: nothing can be decoded."""
    is_sibling = t.name.endswith(".scale") and t.dtype.name == "float8_e8m0fnu"
    if is_sibling or orphans.search(t.name):
        text = "belongs to a quantized weight that is missing"
        weight = f"{t.name.rpartition('.')[0]}.weight"
        if weight in catalogue.index:
            text = f"is part of a quantized weight, and {weight!r} is {catalogue[weight].dtype}"
        raise FormatError(
            text,
            file=catalogue.path(int(catalogue.extents.file[catalogue.index[t.name]])),
            tensor=t.name,
            hint=f"is the download complete? {AS_STORED_HINT}",
            error_id=MISSING,
        )


def _plain_dtype(catalogue: Catalogue) -> DType:
    """The dtype before quantization: the config's if it is a wide float, else bfloat16."""
    config = catalogue.metadata.get("config")
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    for candidate in (config, text if isinstance(text, dict) else {}):
        name = candidate.get("dtype", candidate.get("torch_dtype"))
        if isinstance(name, str) and name in ("bfloat16", "float16", "float32"):
            return dtype(name)
    return dtype("bfloat16")
