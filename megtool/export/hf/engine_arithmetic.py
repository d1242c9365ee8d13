"""Quantized folders computed as engines compute them: rounded inputs and KV caches."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.errors import FormatError
from megtool.export.hf import read_compressed, read_modelopt
from megtool.export.hf.infer_format import QuantizedWeight
from megtool.export.hf.read_quantized import (
    find_kv_cache_scales,
    is_compressed,
    is_modelopt,
    listed_ignored,
)
from megtool.export.small_tensors import SmallTensorReader, reciprocal
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.formats.safetensors.quantized import DECODED_METHODS, find_packed_weights
from megtool.formats.safetensors.quantized_parts import PackedWeight, PartFinder
from megtool.formats.safetensors.reader import open_as_stored
from megtool.number_formats.decode import COLUMNS, LOW_RANK, LOW_RANK_UP, SCALE, SCALE_2
from megtool.options.effects import without_effect
from megtool.quant.qparams import LowRankBranch
from megtool.quant.recipes.formats import ENGINE_INPUTS
from megtool.quant.recipes.modules import BLOCKS, ModuleInfo, list_modules
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.quantize.layout.weight_layout import row_layout
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.catalogue import Catalogue

if TYPE_CHECKING:
    from megtool.inference.forward import Forward
    from megtool.quant.fake_quant.fake_quant_model import StoredQuantization
    from megtool.quant.fake_quant.input_rounding import InputRounding

_LOG = logging.getLogger(__name__)

DEQUANTIZE_HINT = "--dequantize computes with decoded weights, and rounds nothing else"
_CACHE_KINDS = {"FP8": "fp8:tensor", "NVFP4": "nvfp4:16"}
_DYNAMIC = {"int8": "int8:token", "int4": "int4:token", "float8": "fp8:token"}


def check_dequantize(dequantize: bool, *sources: CheckpointSource | None) -> None:
    """Refuse `--dequantize` where nothing is quantized.

    Raises:
        UsageError: so it is.
    """
    if dequantize and not any(s is not None and _is_quantized(s) for s in sources):
        raise without_effect(
            "--dequantize has no effect: the checkpoint is not quantized", "leave it out"
        )


def run_as_engine(forward: Forward, source: CheckpointSource) -> str:
    """Let a model loaded from `source` compute as an engine does, from now on.

    Inputs and KV caches are rounded as the folder says; the product of rounded inputs and decoded
    weights is that of the codes, summed in the dtype of the model. Returns what is rounded; "" if
    the source is not a quantized Hugging Face folder, and nothing changes. All ranks call it.

    Raises:
        FormatError: the folder asks for what no engine computes, or a scale is missing.
        UsageError: modules that share an input round it in different ways.
    """
    from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel

    stored = read_stored_quantization(source)
    if stored is None:
        return ""
    modules = list_modules(source.view)
    sites = list_activation_sites(modules.modules, source.config)
    FakeQuantModel(forward.decoder, sites, _share_scales(stored, sites)).start()
    text = _describe(stored)
    if forward.groups.rank == 0:
        _LOG.info("quantized, and computed as an engine does: %s", text)
    return text


def _describe(stored: StoredQuantization) -> str:
    kinds = Counter(r.kind for r in stored.inputs.values())
    inputs = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    caches = sorted({c.kind for c in stored.caches.values()})
    cache = f", KV cache {', '.join(caches)}" if caches else ""
    return f"inputs {inputs or 'not rounded'}{cache}"


def read_stored_quantization(source: CheckpointSource) -> StoredQuantization | None:
    """What a quantized folder stores for running it; headers and single scales are read.

    None: `source` is not a quantized Hugging Face folder.

    Raises:
        FormatError: see `run_as_engine`.
    """
    from megtool.quant.fake_quant.fake_quant_model import StoredQuantization
    from megtool.quant.fake_quant.input_rounding import CacheRounding

    if not _is_quantized(source):
        return None
    catalogue = open_as_stored(source.catalogue.root)
    config = quantization_config(catalogue.metadata) or {}
    weights, finder = find_packed_weights(catalogue, config)
    names: dict[str, list[str]] = {}
    for name in source.view.canonical:
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            names.setdefault(source.placement_of(name).stored, []).append(module)
    inputs: dict[str, InputRounding] = {}
    branches: dict[str, LowRankBranch] = {}
    with _ScaleReader(catalogue) as scales:
        reader = _RoundingReader(config, catalogue, finder, scales)
        for packed in weights:
            modules = names.get(packed.name, ())
            rounding = reader.read(packed) if modules else None
            if rounding is not None:
                inputs |= dict.fromkeys(modules, rounding)
            if modules and (branch := scales.branch(packed)) is not None:
                branches |= dict.fromkeys(modules, branch)
        caches = {
            module: CacheRounding(kind=kind, key_scale=key, value_scale=value)
            for module, (kind, key, value) in _caches(source, config, catalogue, scales).items()
        }
    return StoredQuantization(
        inputs=inputs,
        caches=caches,
        fp8_scales=_by_module(reader.fp8_scales, names),
        int4_scales=_by_module(reader.int4_scales, names),
        branches={m: _branch_rows(source, m, b) for m, b in branches.items()},
    )


def _branch_rows(source: CheckpointSource, module: str, stored: LowRankBranch) -> LowRankBranch:
    """The branch of a module, of which a stored tensor may hold several.

    Raises:
        FormatError: rows of several modules alternate with each other's columns there.
    """
    place = source.placement_of(f"{module}.weight")
    rows = row_layout(place, source.catalogue[place.stored])
    if rows is None or rows.is_transposed:
        raise FormatError(
            "has a low-rank branch, and no contiguous rows in its tensor",
            file=source.path,
            tensor=place.stored,
            hint=DEQUANTIZE_HINT,
        )
    count = source.view.canonical[f"{module}.weight"].shape[0]
    return LowRankBranch(up=stored.up[rows.indices(count)], down=stored.down)


def _by_module(values: Mapping[str, float], names: Mapping[str, Iterable[str]]) -> dict[str, float]:
    return {module: value for name, value in values.items() for module in names[name]}


def _is_quantized(source: CheckpointSource) -> bool:
    """Whether a Hugging Face folder says how its weights or its KV cache are quantized."""
    is_folder = source.format == "hf" and source.view.dialect == "hf"
    return is_folder and quantization_config(source.catalogue.metadata) is not None


class _ScaleReader(SmallTensorReader):
    """Reads the scales of packed weights."""

    def find(self, packed: PackedWeight, role: str) -> float | None:
        """The one number of a part; None where it has none or several."""
        stored = next((n for p, n in packed.parts if p.role == role), None)
        if stored is None:
            return None
        values = self.read(stored)
        return float(values.reshape(())) if values.size == 1 else None

    def read_one(self, stored: str) -> float:
        """The one number of a tensor, which has no dimensions or those of size 1.

        Raises:
            FormatError: it has several, or one that nothing can be divided by.
        """
        value = float(self.read_number(stored))
        if math.isfinite(value) and value > 0:
            return value
        raise FormatError(
            f"the scale is {value:g}",
            file=self._reader.catalogue.root,
            tensor=stored,
            hint=f"engines multiply and divide by it: calibrate again; {DEQUANTIZE_HINT}",
            error_id="nan-scales",
        )

    def columns(self, packed: PackedWeight) -> Any:
        """The smoothing scales `[in]`, which inputs are divided by; None where none are stored."""
        import torch

        stored = next((n for p, n in packed.parts if p.role == COLUMNS), None)
        if stored is None:
            return None
        values = np.broadcast_to(self.read(stored).reshape(-1), packed.shape[-1:])
        return torch.from_numpy(np.array(reciprocal(values)))

    def branch(self, packed: PackedWeight) -> LowRankBranch | None:
        """SVDQuant's matrices; None where none are stored."""
        names = {p.role: n for p, n in packed.parts}
        if LOW_RANK_UP not in names:
            return None
        up, down = (np.array(self.read(names[r])) for r in LOW_RANK)
        return LowRankBranch(up=up, down=down)

    def __enter__(self) -> _ScaleReader:
        return self


class _RoundingReader:
    """Reads the rounding of the inputs of packed weights, by the method of the folder.

    Scales of weights that have one each are added to `fp8_scales`, and W4A8_AWQ's second scales to
    `int4_scales`, by names of weights.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        catalogue: Catalogue,
        finder: PartFinder,
        scales: _ScaleReader,
    ) -> None:
        self._finder, self._scales = finder, scales
        self.fp8_scales: dict[str, float] = {}
        self.int4_scales: dict[str, float] = {}
        self.read: Callable[[PackedWeight], InputRounding | None] = self._read_fp8
        if str(config.get("quant_method", "")).lower() in DECODED_METHODS:
            self.read = self._read_weight_only
        elif is_modelopt(config):
            self._config = read_modelopt.read_quant_config(catalogue)
            self.read = self._read_modelopt
        elif is_compressed(config):
            self._groups = read_compressed.read_groups(config, catalogue)
            self._ignored = listed_ignored(config)
            self.read = self._read_compressed
        else:
            self._block = config.get("weight_block_size")

    def _read_weight_only(self, packed: PackedWeight) -> InputRounding | None:
        if packed.packing.startswith("int8rows"):
            raise QuantizedWeight(packed=packed, finder=self._finder).error(
                "LLM.int8 rounds all inputs but the largest, which is not computed here",
                hint=DEQUANTIZE_HINT,
            )
        return None

    def _read_modelopt(self, packed: PackedWeight) -> InputRounding | None:
        module = read_modelopt.read_module(QuantizedWeight.of(packed, self._finder), self._config)
        if module.algo == "W4A8_AWQ":
            second = self._scales.read_single(module, SCALE_2)
            self.int4_scales[packed.name] = 0.0 if second is None else float(second)
        if module.algo == "FP8":
            self._add_scale(packed)
        return self._rounding(packed, ENGINE_INPUTS.get(module.algo), module.input_scale)

    def _read_compressed(self, packed: PackedWeight) -> InputRounding | None:
        weight = QuantizedWeight(packed=packed, finder=self._finder)
        group = read_compressed.find_group_of(weight, self._groups, self._ignored)
        kind = _compressed_kind(weight, group)
        if kind is None:
            return None
        read_compressed.check_zero_point(weight, group.inputs)
        if group.strategy == "tensor" and weight.numbers == "fp8":
            self._add_scale(packed)
        tensor = weight.find_single("input_global_scale", "input_scale")
        return self._rounding(packed, kind, tensor, tensor.endswith("input_global_scale"))

    def _read_fp8(self, packed: PackedWeight) -> InputRounding | None:
        weight = QuantizedWeight(packed=packed, finder=self._finder)
        if packed.codes.endswith(BLOCKS) or weight.numbers == "mxfp4":
            return None  # engines multiply these with 16-bit inputs
        tensor = weight.find_single("input_scale", "activation_scale")
        if weight.numbers == "mxfp8":
            kind = "mxfp8:32"
        elif isinstance(self._block, list) and self._block:
            kind = f"fp8:{self._block[-1]}"
        else:
            kind = "fp8:tensor" if tensor else "fp8:token"
            self._add_scale(packed)
        return self._rounding(packed, kind, tensor)

    def _add_scale(self, packed: PackedWeight) -> None:
        scale = self._scales.find(packed, SCALE)
        if scale is not None and len(packed.shape) == 2:
            self.fp8_scales[packed.name] = scale

    def _rounding(
        self, packed: PackedWeight, kind: str | None, tensor: str, divides: bool = False
    ) -> InputRounding | None:
        """The rounding of a kind, with the scale that `tensor` holds (or its reciprocal)."""
        from megtool.quant.fake_quant.input_rounding import InputRounding

        if kind is None:
            return None
        scale = 0.0
        if kind.endswith(":tensor") or kind.startswith("nvfp4"):
            if not tensor:
                raise QuantizedWeight(packed=packed, finder=self._finder).error(
                    f"its inputs are rounded ({kind}) with a scale that is missing",
                    hint=DEQUANTIZE_HINT,
                )
            value = np.float32(self._scales.read_one(tensor))
            scale = float(reciprocal(np.asarray(value)) if divides else value)
        return InputRounding(kind=kind, scale=scale, columns=self._scales.columns(packed))


def _compressed_kind(weight: QuantizedWeight, group: read_compressed.CompressedGroup) -> str | None:
    """The rounding of inputs that a group of compressed-tensors asks for.

    Raises:
        FormatError: no engine rounds inputs so.
    """
    inputs = group.inputs
    if not inputs.numbers:
        return None
    kind: str | None = None
    if inputs.numbers == "float4":
        kind = "nvfp4:16" if weight.numbers == "nvfp4" else "mxfp4:32"
    elif weight.numbers in ("mxfp8", "mxfp4") and inputs.numbers == "float8":
        kind = "mxfp8:32" if weight.numbers == "mxfp8" else "fp8:token"
    elif inputs.scaling == "static":
        kind = {"float8": "fp8:tensor", "int8": "int8:tensor"}.get(inputs.numbers)
    elif inputs.strategy in ("group", "block", "tensor_group"):
        kind = f"fp8:{inputs.group_size}" if inputs.numbers == "float8" else None
    elif inputs.is_symmetric:
        kind = _DYNAMIC.get(inputs.numbers)
    if kind is None or group.has_outputs:
        have = f"{inputs.label} {inputs.strategy}".strip()
        raise weight.error(
            f"its inputs are quantized as {have}"
            + ("" if inputs.is_symmetric else " with a zero point")
            + (", and its outputs too" if group.has_outputs else "")
            + ", which is not computed here",
            hint=DEQUANTIZE_HINT,
        )
    return kind


def _caches(
    source: CheckpointSource,
    config: Mapping[str, Any],
    catalogue: Catalogue,
    scales: _ScaleReader,
) -> dict[str, tuple[str, float, float]]:
    """Kind and scales of keys and values of each layer's cache, by canonical names."""
    stored = find_kv_cache_scales(catalogue)
    if is_modelopt(config):
        algo = read_modelopt.read_quant_config(catalogue).kv_algo or None
    elif is_compressed(config):
        algo = read_compressed.read_kv_cache_algo(config, catalogue)
    else:
        algo = None
    if algo is None and not stored:
        return {}
    kind = _CACHE_KINDS.get(algo or "FP8")
    if kind is None:
        raise FormatError(
            f"its KV cache is quantized as {algo}, which is not computed here",
            file=catalogue.root,
            hint=f"known: {', '.join(_CACHE_KINDS)}; {DEQUANTIZE_HINT}",
        )
    out: dict[str, tuple[str, float, float]] = {}
    for module in _cache_modules(source):
        names = next((stored[n] for n in module.names_in("hf") if n in stored), None)
        key, value = (1.0, 1.0) if names is None else (scales.read_one(n) for n in names)
        if names is not None or algo is not None:
            out[module.name] = kind, key, value
    return out


def _cache_modules(source: CheckpointSource) -> Iterable[ModuleInfo]:
    modules = list_modules(source.view).modules
    return (m for m in modules if m.kind == "kv_cache" and "mtp" not in m.roles)


def _share_scales(
    stored: StoredQuantization, sites: Iterable[ActivationSite]
) -> StoredQuantization:
    """Modules that engines run as one layer take the largest of their input scales."""
    inputs = dict(stored.inputs)
    for site in sites:
        roundings = [inputs[m] for m in site.modules if m in inputs]
        if len({r.scale for r in roundings}) > 1:
            largest = max(r.scale for r in roundings)
            inputs |= {m: replace(inputs[m], scale=largest) for m in site.modules if m in inputs}
    return replace(stored, inputs=inputs)
