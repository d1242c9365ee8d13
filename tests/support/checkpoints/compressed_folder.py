"""compressed-tensors and DeepSeek folders made of a plain one with the encoders alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megtool.number_formats.decode import CODES, DIVISOR, SCALE
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout

_KINDS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "float32": torch.float32,
}

GROUPS: dict[str, dict[str, Any]] = {
    "fp8": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "int4": {
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        "input_activations": None,
    },
    "nvfp4": {
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "input_activations": {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "dynamic": "local",
        },
    },
}
FORMATS = {
    "fp8": ("float-quantized", "fp8:channel"),
    "int4": ("pack-quantized", "int4:64"),
    "nvfp4": ("nvfp4-pack-quantized", "nvfp4:16"),
}


def compress(source: Path, destination: Path, kind: str) -> Path:
    """All linear modules but the head, as compressed-tensors has them."""
    form, packing = FORMATS[kind]
    out: dict[str, torch.Tensor] = {}
    for name, t in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            out[name] = t
            continue
        module, x = name.removesuffix(".weight"), t.float().numpy()
        parts = layout(packing, x.shape, "compressed-tensors")
        given = {DIVISOR: np.full((1,), 2688 / 0.6, np.float32)} if kind == "nvfp4" else {}
        made = encode(
            packing,
            parts,
            x,
            "float32",
            (0, 0),
            x.shape,
            scales=given,
            style="compressed-tensors",
        )
        codes = "weight" if kind == "fp8" else "weight_packed"
        names = {CODES: codes, SCALE: "weight_scale", DIVISOR: "weight_global_scale"}
        for part in parts:
            array = torch.from_numpy(np.array(made[part.role]).reshape(part.shape))
            out[f"{module}.{names[part.role]}"] = array.view(_KINDS[part.dtype])
        if kind == "nvfp4":
            out[f"{module}.input_global_scale"] = torch.tensor([500.0])
        if kind == "int4":
            out[f"{module}.weight_shape"] = torch.tensor(x.shape)
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **GROUPS[kind]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return _write(source, destination, out, config)


def deepseek(source: Path, destination: Path) -> Path:
    """FP8 in blocks of 128 x 128 with `weight_scale_inv`."""
    out: dict[str, torch.Tensor] = {}
    for name, t in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            out[name] = t
            continue
        x = t.float().numpy()
        parts = layout("fp8:128x128", x.shape, "compressed-tensors")
        made = encode("fp8:128x128", parts, x, "float32", (0, 0), x.shape)
        out[name] = torch.from_numpy(np.array(made[CODES])).view(torch.float8_e4m3fn)
        scale = np.array(made[SCALE]).reshape(parts[1].shape)
        out[f"{name}_scale_inv"] = torch.from_numpy(scale).view(torch.float32)
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
    }
    return _write(source, destination, out, config)


def _write(
    source: Path, destination: Path, tensors: dict[str, torch.Tensor], said: dict[str, Any]
) -> Path:
    shutil.copytree(source, destination)
    held = {n: t.contiguous() for n, t in tensors.items()}
    save_file(held, destination / "model.safetensors", {"format": "pt"})
    config = json.loads((destination / "config.json").read_text())
    config["quantization_config"] = said
    (destination / "config.json").write_text(json.dumps(config))
    return destination
