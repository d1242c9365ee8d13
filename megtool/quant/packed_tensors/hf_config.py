"""The quantization config of a Hugging Face folder: hf_quant_config.json and config.json.

Both have the same content, because engines read one or the other: TensorRT-LLM and SGLang read
hf_quant_config.json first, vLLM either, in ModelOpt's schema. Keys that ModelOpt 0.47 leaves out
but an engine needs (groups and `pre_quant_scale` in config.json, upper-case algorithms) are added.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megtool import __version__
from megtool.convert.families.nested import tower_of
from megtool.formats.safetensors.quantization_config import TRANSFORMS_KEY
from megtool.quant.recipes.formats import ALGO_SPELLING, FORMATS, PLAIN_ALGOS, SMOOTHED_ALGOS

MIXED = "MIXED_PRECISION"

PRODUCER = {"name": "modelopt", "version": "0.47.0", "written_by": f"megtool {__version__}"}
"""Engines recognize the file by the producer's name; the version is that of the schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """One quantized module under its stored name, its format, whether it has a `pre_quant_scale`,
    and the rank of SVDQuant's matrices (0: it has none)."""

    name: str
    algo: str
    group_size: int = 0
    smoothed: bool = False
    rank: int = 0


def quantization(
    layers: Sequence[QuantizedLayer], unquantized: Iterable[str], kv_algo: str | None
) -> dict[str, Any]:
    """The `quantization` section of hf_quant_config.json.

    `unquantized` are the stored names of linear modules that are not quantized.
    """
    entries = [_layer_config(layer) for layer in layers]
    different = {(layer.algo, layer.group_size) for layer in layers}
    out: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv_algo}
    if len(different) == 1:  # smoothed or not: for some the norm has the smoothing scales
        out |= next((s for s in entries if s.get("pre_quant_scale")), entries[0])
    elif different:
        out["quant_algo"] = MIXED
    out["exclude_modules"] = summarize_modules(unquantized, [layer.name for layer in layers])
    if len(different) > 1:
        out["quantized_layers"] = {layer.name: s for layer, s in zip(layers, entries, strict=True)}
    return out


def _layer_config(layer: QuantizedLayer) -> dict[str, Any]:
    algo = SMOOTHED_ALGOS.get(layer.algo, layer.algo) if layer.smoothed else layer.algo
    out: dict[str, Any] = {"quant_algo": ALGO_SPELLING.get(algo, algo)}
    if layer.group_size:
        out["group_size"] = layer.group_size
    if layer.smoothed or layer.algo in ("W4A16_AWQ", "W4A8_AWQ"):
        out |= {"has_zero_point": False, "pre_quant_scale": layer.smoothed}
    if layer.rank:
        out["lora_rank"] = layer.rank
    return out


_EXPERT = re.compile(r"(.+\.experts)\.\d+\..+")


def summarize_modules(unquantized: Iterable[str], quantized: Collection[str]) -> list[str]:
    """Sorted names of unquantized modules, with experts and parts other than text as globs.

    A vision tower is one glob, as ModelOpt writes it. The experts of a layer become one glob if all
    of them are unquantized: engines build them as one module, named like the part before the star.
    """
    expert_modules = {m[1] for name in quantized if (m := _EXPERT.fullmatch(name))}
    out: dict[str, None] = {}
    for name in unquantized:
        if (tower := tower_of(name)) is not None:
            out[f"{tower}*"] = None
            continue
        match = _EXPERT.fullmatch(name)
        out[f"{match[1]}*" if match and match[1] not in expert_modules else name] = None
    return sorted(out)


def hf_quant_config(section: Mapping[str, Any]) -> bytes:
    """The content of hf_quant_config.json."""
    value = {"producer": PRODUCER, "quantization": section}
    return (json.dumps(value, indent=4, ensure_ascii=False) + "\n").encode()


def with_quantization(config: bytes, section: Mapping[str, Any]) -> bytes:
    """A config.json with the same quantization config as `hf_quant_config`."""
    value = json.loads(config)
    value["quantization_config"] = inline(section)
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def with_blocks(config: bytes, unquantized: Iterable[str]) -> bytes:
    """A config.json that declares all experts as MXFP4 blocks, as OpenAI's gpt-oss does.

    `unquantized` are the stored names of modules that are not quantized but could be taken for it.
    """
    value = json.loads(config)
    value["quantization_config"] = {
        "modules_to_not_convert": sorted(
            dict.fromkeys(_LAYER_NUMBER.sub(".*", n) for n in unquantized)
        ),
        "quant_method": "mxfp4",
    }
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def with_transforms(config: bytes, transforms: Mapping[str, Any]) -> bytes:
    """A config.json whose `quantization_config` says how the weights are rotated.

    Engines need not read it: these rotations are in the weights.
    """
    value = json.loads(config)
    value.pop(TRANSFORMS_KEY, None)  # where a folder that is not quantized has it
    value["quantization_config"][TRANSFORMS_KEY] = transforms
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


_LAYER_NUMBER = re.compile(r"\.\d+(?=\.)")


def inline(section: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    `kv_cache_scheme` is only written for FP8, because loaders ignore any other.
    """
    out: dict[str, Any] = {}
    groups = _groups(section)
    if groups:
        out["config_groups"] = groups
    out["ignore"] = list(section["exclude_modules"])
    plain = ("group_size", "has_zero_point", "pre_quant_scale", "lora_rank", "quantized_layers")
    out |= {"quant_algo": section["quant_algo"]} | {k: section[k] for k in plain if k in section}
    if section["kv_cache_quant_algo"]:
        out["kv_cache_quant_algo"] = section["kv_cache_quant_algo"]
    if section["kv_cache_quant_algo"] == "FP8":
        out["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {**out, "producer": PRODUCER, "quant_method": "modelopt"}


def _groups(section: Mapping[str, Any]) -> dict[str, Any]:
    """`config_groups` in the schema of compressed-tensors, for the formats for which ModelOpt
    writes them."""
    if section["quant_algo"] == MIXED:
        names_by_layer: dict[str, list[str]] = defaultdict(list)
        for name, layer in section["quantized_layers"].items():
            names_by_layer[json.dumps(layer)].append(name)
        kinds = [(json.loads(key), sorted(names)) for key, names in names_by_layer.items()]
    elif section["quant_algo"] in ("FP8", "NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4"):
        kinds = [(dict(section), ["Linear"])]
    else:
        return {}
    return {
        f"group_{i}": {
            **_scheme(layer["quant_algo"], layer.get("group_size", 0)),
            **{k: layer[k] for k in _BRANCH_KEYS if "lora_rank" in layer},
            "targets": targets,
        }
        for i, (layer, targets) in enumerate(kinds)
    }


_BRANCH_KEYS = ("has_zero_point", "pre_quant_scale", "lora_rank")
"""What ModelOpt 0.47 adds to a group with SVDQuant's matrices (`convert_hf_config.py`)."""

_INPUT_BITS = {"FP8": 8, "NVFP4": 4, "INT8": 8, "MXFP8": 8, "MXFP4": 4}


def _scheme(algo: str, group: int) -> dict[str, Any]:
    """The schemes of weights and inputs of a format."""
    form = FORMATS[PLAIN_ALGOS.get(algo, algo).upper()]
    kind = "int" if form.weights.startswith("INT") else "float"
    weights: dict[str, Any] = {"dynamic": False, "num_bits": form.bits, "type": kind}
    if form.scaling == "channel":
        weights["strategy"] = "channel"
    elif form.scaling == "block":
        weights |= {"strategy": "block", "block_structure": [group, group]}
    elif group:
        weights["group_size"] = group
    word = form.inputs.split(",")[0].split(" ")[0]
    if word not in _INPUT_BITS or form.scaling == "block":
        return {"weights": weights}
    inputs: dict[str, Any] = {
        "dynamic": not form.calibrates,
        "num_bits": _INPUT_BITS[word],
        "type": "int" if word == "INT8" else "float",
    }
    if word in ("NVFP4", "MXFP8", "MXFP4"):
        inputs["group_size"] = group
    return {"input_activations": inputs, "weights": weights}
