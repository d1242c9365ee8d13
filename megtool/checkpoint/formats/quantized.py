"""Quantized Hugging Face folders: codes and scales presented as the plain tensors they stand for.

What is decoded, by `quant_method` of config.json: `fp8` (DeepSeek, and others that publish blocks
of 128 x 128), `fbgemm_fp8`, `mxfp4` (gpt-oss), `compressed-tensors` and `modelopt` (also where
only `hf_quant_config.json` says so). A weight and its scales become one tensor under its plain
name, of the dtype the config gives, with a `packing`; scales of activations are set aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Extents, SetAside, StoredPart
from megtool.checkpoint.formats.header_reader import shown
from megtool.checkpoint.formats.quantized_parts import (
    AS_IT_IS,
    Folded,
    Stored,
    codes_in_bytes,
    codes_in_row_pairs,
    codes_in_words,
    one_byte_codes,
    transposed_blocks,
)
from megtool.dtypes import DType, dtype
from megtool.errors import FormatError
from megtool.tensors.box import Boxes
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes, widest

QUANT_FILE = "hf_quant_config.json"
"""Where modelopt says what it did, beside (or instead of) config.json."""

QUANT_KEYS = ("quantization_config", "compression_config")
"""Where config.json says it."""

_ACTIVATIONS = re.compile(
    r"(?:^|[._])(?:(?:input|output|activation)_(?:scale(?:_ub)?|global_scale|zero_point)"
    r"|[qkv]_(?:scale|zero_point)|[kv]_proj\.[kv]_bias)$"
)
_WHY_ASIDE = "scales of activations and of the KV cache: decoded weights need none"
_WHY_SECOND = "scales what decoded weights are quantized to again: they need none"
_ORPHANS = re.compile(
    r"weight_(?:scale(?:_inv|_2)?|packed|global_scale|zero_point|shape|g_idx)$"
    r"|_scale_inv$|_proj_(?:weight_scale(?:_2)?|scales)$"
)
_SCALES = re.compile(r"_(?:scale(?:_inv|_2)?|scales|blocks|packed|global_scale|zero_point|shape)$")


def fold(catalogue: Catalogue) -> Catalogue:
    """The catalogue with every quantized weight as one packed tensor.

    A catalogue whose config names no quantization is returned as it is. Headers, and the few bytes
    of `weight_shape`, are all that is read.

    Raises:
        FormatError: see `packed_weights`.
    """
    config = quantization(catalogue.metadata)
    return catalogue if config is None else _with(catalogue, *packed_weights(catalogue, config))


def packed_weights(catalogue: Catalogue, config: Mapping[str, Any]) -> tuple[list[Folded], Stored]:
    """Every quantized weight as the stored tensors it lies in, and which of these were used.

    `config` is what `quantization` found. Nothing is decoded.

    Raises:
        FormatError: the method is not one of those above, a weight lacks its scale or a scale its
            weight, or shapes do not belong together.
    """
    method = str(config.get("quant_method", "")).lower()
    finder = next((f for name, f in _METHODS if re.fullmatch(name, method)), None)
    if finder is None:
        raise FormatError(
            f"quantized by {shown(config.get('quant_method'))}, which is not decoded",
            file=catalogue.root,
            hint=f"known: fp8, fbgemm_fp8, mxfp4, compressed-tensors, modelopt; {AS_IT_IS}",
        )
    for key in ("sparsity_config", "transform_config"):
        more = config.get(key)
        if isinstance(more, dict) and more and more.get("format") != "dense":
            raise FormatError(
                f"its {key} {shown(more)} is not decoded", file=catalogue.root, hint=AS_IT_IS
            )
    stored = Stored(catalogue, Facts.of(config))
    found: list[Folded] = []
    for t in catalogue.tensors:
        if t.name not in stored.used and (folded := finder(stored, t)) is not None:
            found.append(folded)
    known = stored.used | {f.codes for f in found}
    for t in catalogue.tensors:
        if t.name not in known and not _ACTIVATIONS.search(t.name):
            _check_alone(catalogue, t)
    return found, stored


def quantization(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a folder says about its quantization, as one dictionary with a `quant_method`."""
    config = metadata.get("config")
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in QUANT_KEYS:
            found = place.get(key)
            if isinstance(found, dict):
                return found
    beside = metadata.get("hf_quant_config")
    if isinstance(beside, dict) and isinstance(beside.get("quantization"), dict):
        return {"quant_method": "modelopt", **beside["quantization"]}
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a config says: sizes of groups along columns, of blocks, and bits, any of which one
    weight or another may have. `stated`: it names groups or blocks, so that no others are."""

    groups: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    stated: bool
    bits: tuple[int, ...]
    scales: tuple[str, str] = ("_scale", "_scale_inv")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Facts:
        """Collected from the whole config, wherever they stand in it."""
        method = str(config.get("quant_method", "")).lower()
        groups: list[int] = []
        blocks: list[tuple[int, int]] = []
        bits: list[int] = []
        waiting: list[Any] = [config]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                waiting += value
            if not isinstance(value, dict):
                continue
            for key, inner in value.items():
                if key == "group_size" and type(inner) is int and inner > 0:
                    groups.append(inner)
                elif key == "num_bits" and type(inner) is int:
                    bits.append(inner)
                elif key in ("weight_block_size", "block_structure") and _is_block(inner):
                    blocks.append((inner[0], inner[1]))
                else:
                    waiting.append(inner)
        return cls(
            groups=tuple(dict.fromkeys(groups)),
            blocks=tuple(dict.fromkeys([*blocks, (128, 128)])),
            stated=bool(groups or blocks),
            bits=tuple(dict.fromkeys(bits)),
            scales=("_scale_inv", "_scale") if method == "fp8" else ("_scale", "_scale_inv"),
        )


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)
    )


# ---- methods: each takes a stored tensor, and gives what it is the codes of, if of anything

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _float8(stored: Stored, t: GlobalTensor) -> Folded | None:
    """`fp8`, `fbgemm_fp8`: eight-bit floats, with `_scale_inv` or `_scale` beside the name; among
    them FP4 codes in int8, as transformers reads them."""
    if _SCALES.search(t.name) or not t.shape:
        return None
    if t.dtype.name in _FP8:
        return one_byte_codes(stored, t, "fp8")
    if t.dtype.name in ("int8", "uint8") and stored.find(t.name, "_scale_inv", "_scale"):
        return codes_in_bytes(stored, t, t.name)
    return None


def _gpt_oss(stored: Stored, t: GlobalTensor) -> Folded | None:
    """`mxfp4`: `NAME_blocks` and `NAME_scales`."""
    if t.name.endswith("_blocks") and t.dtype.name == "uint8":
        return transposed_blocks(stored, t)
    return None


def _compressed(stored: Stored, t: GlobalTensor) -> Folded | None:
    """`compressed-tensors`: `weight` of one byte, or `weight_packed`."""
    if t.name.endswith("_packed"):
        if t.dtype.name == "int32":
            return codes_in_words(stored, t)
        return codes_in_bytes(stored, t, t.name.removesuffix("_packed"))
    return _one_byte(stored, t)


def _one_byte(stored: Stored, t: GlobalTensor) -> Folded | None:
    if not t.shape or _SCALES.search(t.name):
        return None
    if t.dtype.name in _FP8:
        return one_byte_codes(stored, t, "fp8")
    if t.dtype.name == "int8":
        return one_byte_codes(stored, t, "int8")
    return None


def _modelopt(stored: Stored, t: GlobalTensor) -> Folded | None:
    """`modelopt`: `weight` of one byte; its shape beside the scale's tells how it is packed."""
    if t.dtype.name != "uint8" or _SCALES.search(t.name) or len(t.shape) < 2:
        return _one_byte(stored, t)
    scale = stored.find(t.name, "_scale")
    if scale is None and not t.name.endswith("weight"):
        return None
    scale = stored.need(t, "_scale")
    if len(scale.shape) == len(t.shape) and scale.shape[-2] == 2 * t.shape[-2]:
        return codes_in_row_pairs(stored, t)
    return codes_in_bytes(stored, t, t.name)


_METHODS: tuple[tuple[str, Callable[[Stored, GlobalTensor], Folded | None]], ...] = (
    ("fp8|fbgemm_fp8", _float8),
    ("mxfp4", _gpt_oss),
    ("compressed-tensors|compressed_tensors", _compressed),
    ("modelopt(?:_fp4|_mixed|_fp8|_mxfp8)?", _modelopt),
)


# ---- the catalogue that comes of it


def _with(catalogue: Catalogue, found: list[Folded], stored: Stored) -> Catalogue:
    """The catalogue in which packed tensors stand where their codes stood."""
    kind = _plain_dtype(catalogue)
    folded = {f.codes: f for f in found}
    aside: list[SetAside] = []
    tensors: list[GlobalTensor] = []
    rows: list[int] = []
    for row, t in enumerate(catalogue.tensors):
        if f := folded.get(t.name):
            tensors.append(GlobalTensor(name=f.name, shape=f.shape, dtype=kind, packing=f.packing))
        elif t.name in stored.second:
            aside.append(SetAside(name=t.name, reason=_WHY_SECOND, num_bytes=t.num_bytes))
            continue
        elif t.name in stored.used:
            continue
        elif _ACTIVATIONS.search(t.name):
            aside.append(SetAside(name=t.name, reason=_WHY_ASIDE, num_bytes=t.num_bytes))
            continue
        else:
            tensors.append(t)
        rows.append(row)
    e, at = catalogue.extents, np.array(rows, np.int64)
    shapes = padded_shapes(tensors, widest(tensors))
    out = replace(
        catalogue,
        tensors=tensors,
        shards=Shards(
            np.arange(len(tensors), dtype=np.int32),
            Boxes(np.zeros_like(shapes), shapes),
            catalogue.shards.owner[at],
        ),
        extents=Extents(file=e.file[at], offset=e.offset[at], length=e.length[at]),
        packed={f.name: tuple(_place(catalogue, f)) for f in found},
        set_aside=aside,
        _index={},
    )
    out.check()
    return out


def _place(catalogue: Catalogue, f: Folded) -> list[StoredPart]:
    e = catalogue.extents
    return [
        StoredPart(part=part, file=int(e.file[row]), offset=int(e.offset[row]))
        for part, row in ((p, catalogue.index[name]) for p, name in f.parts)
    ]


def _check_alone(catalogue: Catalogue, t: GlobalTensor) -> None:
    """A left-over scale, or what it scaled: its partner is missing, so nothing can be decoded."""
    if _ORPHANS.search(t.name):
        raise FormatError(
            "belongs to a quantized weight that is not here",
            file=catalogue.path(int(catalogue.extents.file[catalogue.index[t.name]])),
            tensor=t.name,
            hint=f"is the download complete? {AS_IT_IS}",
        )


def _plain_dtype(catalogue: Catalogue) -> DType:
    """What weights had been before: the config's dtype if it is a wide float, else bfloat16."""
    config = catalogue.metadata.get("config")
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        said = place.get("dtype", place.get("torch_dtype"))
        if isinstance(said, str) and said in ("bfloat16", "float16", "float32"):
            return dtype(said)
    return dtype("bfloat16")
