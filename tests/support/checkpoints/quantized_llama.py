"""A quantized Llama in three files, and what its tensors decode to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.checkpoints.quantized_weights import MAKERS
from tests.support.checkpoints.quantized_weights import write as write_folder
from tests.support.models import tiny_llama

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}


def write_quantized_llama(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Make such a folder, in three files; what its tensors decode to."""
    plain = tiny_llama.save(folder.parent / "plain", **SIZES)
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    config: dict[str, Any] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = decoded[name] = tensor
            continue
        made = MAKERS[kind](tensor)
        stem = name.removesuffix("weight")
        stored |= {stem + key: t.clone() for key, t in made.stored.items()}
        decoded[name], config = made.decoded.to(torch.bfloat16), made.config
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    folder_config = json.loads((plain / "config.json").read_text())
    write_folder(folder, stored, config, parts=3, **folder_config)
    (folder / "tokenizer.json").write_bytes(tiny_llama.TOKENIZER)
    if config["quant_method"] == "modelopt":
        beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return decoded
