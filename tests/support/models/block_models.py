"""A DeepSeek-V3 in FP8 blocks as published, with layers of multi-token prediction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.quantized_weights import MAKERS
from tests.support.folders import read_config
from tests.support.models import moe_cases, mtp_models

SIZES: dict[str, Any] = moe_cases.DEEPSEEK | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
"""Sizes that engines load in blocks; some of the last blocks are cut."""


def save(plain: Path, folder: Path) -> None:
    """The folder in blocks, and `plain`, which has what its weights stand for."""
    moe_cases.save(("deepseek_v3", "DeepseekV3", SIZES), plain)
    to = "model.layers.{}."
    mtp_models.add_layers(plain, "model.layers.1.", to, 2, mtp_models.DEEPSEEK)
    (plain / "tokenizer.json").write_text("{}")
    shutil.copytree(plain, folder)
    held = load_file(plain / "model.safetensors")
    for layer in (2, 3):
        held[f"{to.format(layer)}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        held[f"{to.format(layer)}shared_head.head.weight"] = held["lm_head.weight"].clone()
    codes = dict(held)
    for name, tensor in held.items():
        if name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name:
            made = MAKERS["deepseek"](tensor)
            held[name] = made.decoded.contiguous()
            scale = made.stored["weight_scale_inv"]
            codes |= {name: made.stored["weight"], f"{name}_scale_inv": scale}
    save_file(held, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, folder / "model.safetensors", metadata={"format": "pt"})
    declared = MAKERS["deepseek"](torch.ones(1, 1)).config
    config = read_config(folder) | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
