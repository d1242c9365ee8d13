"""Write compressed-tensors folders as llm-compressor publishes them.

Scales are float32, so that none is rounded: the library computes in the type of scales.
Source of names, shapes and keys: compressed-tensors 0.20, `quantization/quant_scheme.py` and
`compressors`; vLLM `compressed_tensors/schemes`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool.errors import MappingError, listed
from megtool.export.hf.tensor_specs import (
    ModuleTensors,
    edit_config,
    tensor,
    transforms_of,
    weight_shape,
)
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.formats.safetensors.quantization_config import QUANT_FILE, QUANT_KEYS
from megtool.number_formats.decode import CODES, DIVISOR, SCALE
from megtool.number_formats.layout import layout
from megtool.quant.recipes.compressed_arguments import EXPRESSION
from megtool.tensors.sharded import GlobalTensor

VERSION = "0.20.0"
"""The version of compressed-tensors whose form this is."""

MIXED = "mixed-precision"
DENSE = "dense"

_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}
_TENSOR = {"strategy": "tensor"}
_CHANNEL = {"strategy": "channel"}
_TOKEN = {"strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFormat:
    """How a format of ours is said: the library's name for how codes lie, our packing of the same,
    and its arguments of weights and inputs (empty: inputs as they are)."""

    format: str
    packing: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]


SCHEMES: Mapping[str, CompressedFormat] = {
    "FP8": CompressedFormat(
        format="float-quantized",
        packing="fp8:tensor",
        weights=_FLOAT8 | _TENSOR,
        inputs=_FLOAT8 | _TENSOR | {"dynamic": False},
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": CompressedFormat(
        format="float-quantized",
        packing="fp8:channel",
        weights=_FLOAT8 | _CHANNEL,
        inputs=_FLOAT8 | _TOKEN,
    ),
    "FP8_PB_WO": CompressedFormat(
        format="float-quantized",
        packing="fp8:128x128",
        weights=_FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
        inputs=_FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "W8A8_SQ_PER_CHANNEL": CompressedFormat(
        format="int-quantized",
        packing="int8:channel",
        weights=_INT8 | _CHANNEL,
        inputs=_INT8 | _TENSOR | {"dynamic": False},
    ),
    "W8A16": CompressedFormat(
        format="pack-quantized",
        packing="int8words:channel",
        weights=_INT8 | _CHANNEL,
        inputs={},
    ),
    "W4A16_AWQ": CompressedFormat(
        format="pack-quantized",
        packing="int4:{group}",
        weights={"num_bits": 4, "type": "int", "strategy": "group"},
        inputs={},
    ),
    "MXFP8": CompressedFormat(
        format="mxfp8-quantized",
        packing="mxfp8:32",
        weights=_FLOAT8 | {"strategy": "group", "scale_dtype": "torch.uint8"},
        inputs=_FLOAT8
        | {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
    ),
    "MXFP4": CompressedFormat(
        format="mxfp4-pack-quantized",
        packing="mxfp4:32",
        weights=_FLOAT4 | {"strategy": "group", "scale_dtype": "torch.uint8"},
        inputs=_FLOAT4
        | {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
    ),
    "NVFP4": CompressedFormat(
        format="nvfp4-pack-quantized",
        packing="nvfp4:{group}",
        weights=_FLOAT4 | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
        inputs=_FLOAT4
        | {
            "strategy": "tensor_group",
            "group_size": 16,
            "dynamic": "local",
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "W4A16_NVFP4": CompressedFormat(
        format="nvfp4-pack-quantized",
        packing="nvfp4:{group}",
        weights=_FLOAT4 | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
        inputs={},
    ),
}
"""What compressed-tensors has a scheme for, by our formats."""

_NEAREST: Mapping[str, str] = {
    "W4A8_AWQ": "int4_awq with `fold: true`, or fp8",
    "W4A8_MXFP4_FP8": "mxfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
}

_PACKED = ("int32", "uint8")
"""Types of codes that are called `weight_packed`."""


class CompressedForm:
    """compressed-tensors' names and shapes."""

    name = "compressed-tensors"

    def check(self, folder: QuantizedModules) -> None:
        unknown: dict[str, list[str]] = defaultdict(list)
        for m in folder.modules:
            if m.algo not in SCHEMES:
                unknown[m.algo].append(m.name)
        for algo, names in unknown.items():
            raise MappingError(
                f"compressed-tensors has no scheme for {algo}, the format of {listed(names)}",
                file=folder.catalogue.root,
                tensor=names[0],
                hint=f"the nearest recipe that works: {_NEAREST.get(algo, 'fp8')}",
                error_id="unsupported-by-engine",
            )
        smoothed = [m.name for m in folder.modules if m.is_smoothed]
        if smoothed:
            raise MappingError(
                "compressed-tensors has no place for factors of columns (pre_quant_scale), which "
                f"{len(smoothed)} modules have: {listed(smoothed)}",
                file=folder.catalogue.root,
                tensor=smoothed[0],
                hint="quantize with `fold: true` in the recipe's algorithm (factors then go into "
                "norms alone), or by a recipe without factors, such as int4_gptq or fp8",
                error_id="unsupported-by-engine",
            )
        if folder.kv_algo not in (None, "FP8"):
            raise MappingError(
                f"compressed-tensors has no KV cache in {folder.kv_algo}",
                file=folder.catalogue.root,
                hint="quantize with fp8_kv_fp8, or leave the cache as it is",
                error_id="unsupported-by-engine",
            )

        if folder.kv_cache_biases:
            raise MappingError(
                "compressed-tensors has no place for biases of keys and values, which "
                f"{len(folder.kv_cache_biases)} projections have",
                file=folder.catalogue.root,
                tensor=folder.kv_cache_biases[0],
                hint="quantize with fp8_kv_fp8, which has none, or export with --to unified",
                error_id="unsupported-by-engine",
            )

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        out = []
        blocks = [m.name for m in folder.modules if m.algo == "FP8_PB_WO"]
        if blocks and folder.form == "modelopt":
            out.append(
                f"{len(blocks)} modules: inputs are said to be rounded to FP8 in groups of 128, as "
                "engines do that load FP8_PB_WO"
            )
        experts = [m for m in folder.modules if _EXPERT.fullmatch(m.name)]
        if any(m.algo in ("NVFP4", "W4A16_NVFP4") for m in experts):
            out.append(
                "transformers (5.23) leaves weight_global_scale of experts out, and loads them "
                "wrong; engines read it"
            )
        kinds = [
            {(m.algo, m.group_size) for m in folder.modules if bool(_EXPERT.fullmatch(m.name)) == e}
            for e in (True, False)
        ]
        if experts and max(map(len, kinds)) > 1:
            out.append(
                "transformers (5.23) takes all experts for one format, and all other modules for "
                "one: it does not load several of either; engines do"
            )
        return out

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        scheme = SCHEMES[module.algo]
        packing = scheme.packing.format(group=module.group_size)
        parts = []
        for part in layout(packing, module.shape, "compressed-tensors"):
            packed = part.role == CODES and part.dtype in _PACKED
            last = "weight_packed" if packed else _LAST[part.role]
            parts.append((part, tensor(f"{module.name}.{last}", part.shape, part.dtype)))
        inputs, divides = None, module.algo == "NVFP4"
        if module.input_scale:
            last = "input_global_scale" if divides else "input_scale"
            inputs = tensor(f"{module.name}.{last}", (1,), "float32")
        values = []
        if scheme.format == "pack-quantized":
            values = [(tensor(f"{module.name}.weight_shape", (2,), "int64"), weight_shape(module))]
        return ModuleTensors(
            module=module,
            packing=packing,
            parts=tuple(parts),
            input_scale=inputs,
            divides=divides,
            values=tuple(values),
        )

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        return [
            (tensor(f"{attention}.{kind}_scale", (1,), "float32"), name)
            for attention, names in folder.kv_cache_scales.items()
            for kind, name in zip("kv", names, strict=True)
        ]

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """config.json alone says it."""
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        config = {"quantization_config": compressed_config(folder)}
        before = out.get("config.json", json.dumps({}).encode())
        return out | {
            "config.json": edit_config(
                before, remove=QUANT_KEYS, add=config, untie=folder.has_untied_head
            )
        }


_LAST = {CODES: "weight", SCALE: "weight_scale", DIVISOR: "weight_global_scale"}


def compressed_config(folder: QuantizedModules) -> dict[str, Any]:
    """The `quantization_config`: a group for each format and group size.

    Where there is one, it is for all linear modules; where there are several, each names its own,
    experts by an expression.
    """
    alike: dict[tuple[str, int], list[str]] = defaultdict(list)
    for m in folder.modules:
        alike[m.algo, m.group_size].append(m.name)
    everything = [m.name for m in folder.modules]
    groups: dict[str, Any] = {}
    for number, ((algo, group), names) in enumerate(alike.items()):
        targets = ["Linear"] if len(alike) == 1 else _targets(names, everything)
        groups[f"group_{number}"] = _group(SCHEMES[algo], group, targets)
    formats = {SCHEMES[algo].format for algo, _ in alike}
    out: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED if formats else DENSE,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": list(folder.unquantized),
        "kv_cache_scheme": None,
        "version": VERSION,
    }
    out |= transforms_of(folder)
    if folder.kv_algo == "FP8":
        out["kv_cache_scheme"] = _arguments(_FLOAT8 | _TENSOR | {"dynamic": False})
    return out


_EXPERT = re.compile(r"(.+\.experts)\.\d+\..+")
_ALL_EXPERTS = r"re:.*\.experts\.\d+\..+"


def _targets(names: Sequence[str], everything: Sequence[str]) -> list[str]:
    """Targets of the modules of a group: names, and expressions for experts.

    Loaders that run experts as one (transformers) look for such as begin with `re:` and have
    `experts` in them.
    """
    experts: dict[str, list[str]] = defaultdict(list)
    for name in everything:
        if m := _EXPERT.fullmatch(name):
            experts[m[1]].append(name)
    group = set(names)
    if experts and all(n in group for members in experts.values() for n in members):
        return [_ALL_EXPERTS, *(n for n in names if not _EXPERT.fullmatch(n))]
    out: dict[str, None] = {}
    for name in names:
        m = _EXPERT.fullmatch(name)
        if m is None:
            out[name] = None
        elif all(n in group for n in experts[m[1]]):
            out[f"{EXPRESSION}{re.escape(m[1])}\\..+"] = None
        else:
            out[f"{EXPRESSION}{re.escape(name)}$"] = None
    return list(out)


def _group(scheme: CompressedFormat, group: int, targets: Sequence[str]) -> dict[str, Any]:
    weights = dict(scheme.weights)
    if weights["strategy"] in ("group", "tensor_group"):
        weights["group_size"] = group
    return {
        "targets": list(targets),
        "weights": _arguments(weights),
        "input_activations": _arguments(scheme.inputs) if scheme.inputs else None,
        "output_activations": None,
        "format": scheme.format,
    }


def _arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of weights or inputs, with those that the library fills in itself."""
    return {
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        **args,
    }


class PassthroughForm:
    """All tensors under their own names. compressed-tensors says more than any format of ours:
    what is read of it would lose some, and nothing of it is to change."""

    name = "compressed-tensors, as it is"

    def check(self, folder: QuantizedModules) -> None:
        """It says what it said before."""

    def notes(self, folder: QuantizedModules) -> Sequence[str]:
        """Nothing becomes otherwise."""
        return ()

    def plan_module(self, module: QuantizedModule) -> ModuleTensors:
        """See `FolderForm`; there are no modules to be written."""
        raise ValueError(f"{module.name} is carried as it is")

    def plan_kv_cache(self, folder: QuantizedModules) -> Sequence[tuple[GlobalTensor, str]]:
        """They are tensors like others."""
        return ()

    def edit_files(self, folder: QuantizedModules, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """As they are; an output layer with codes of its own is said to be no embedding."""
        out = {n: d for n, d in files.items() if n != QUANT_FILE}
        if folder.has_untied_head and "config.json" in out:
            out["config.json"] = edit_config(out["config.json"], add={}, untie=True)
        return out
