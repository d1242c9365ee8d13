"""Families with layers of multi-token prediction, as published: transformers drops those layers.

Two of them transformers does not know; a model of a family that computes the same stands for the
rest of it (its twin), under their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.folders import Stored, read_config, stored_tensors
from tests.support.models import dense_cases, moe_cases
from tests.support.models.tiny_model import UNTIED, Case

LAYERS = 2
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_BAILING_KEYS = {
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "norm_head": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def glm4_moe(folder: Path) -> tuple[Any, str]:
    """A GLM-4.5, and the names of the layer that others are like."""
    case = next(c for c in moe_cases.CASES if c[0] == "glm4_moe")
    model = moe_cases.save(case, folder)
    add_layers(folder, "model.layers.3.", "model.layers.{}.", 4, DEEPSEEK)
    return model, "glm4_moe"


def bailing_moe_v2(folder: Path) -> tuple[Any, str]:
    """The same GLM-4.5 as a Ling 2.0."""
    model, _ = glm4_moe(folder)
    held = load_file(folder / "model.safetensors")
    renamed: dict[str, Tensor] = {}
    for name, tensor in held.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            parts = [held[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            tensor, name = torch.cat(parts), name.replace("q_proj", "query_key_value")
        for old, new in (
            ("embed_tokens", "word_embeddings"),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("self_attn.", "attention."),
            ("e_score_correction_bias", "expert_bias"),
            ("shared_head.norm", "final_layernorm"),
        ):
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    shared, experts = config.pop("n_shared_experts"), config.pop("n_routed_experts")
    config |= _BAILING_KEYS | {"num_shared_experts": shared, "num_experts": experts}
    config |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"}
    (folder / "config.json").write_text(json.dumps(config))
    return model, "bailing_moe_v2"


def mimo(folder: Path) -> tuple[Any, str]:
    """A Qwen2 with MiMo's layers of multi-token prediction."""
    model = dense_cases.save(Case("qwen2", UNTIED), folder)
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    add_layers(folder, "model.layers.1.", "model.mtp_layers.{}.", 0, names)
    config = read_config(folder) | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    return model, "mimo"


FAMILIES: dict[str, Callable[[Path], tuple[Any, str]]] = {
    f.__name__: f for f in (glm4_moe, bailing_moe_v2, mimo)
}
"""Each saves a model to a folder, and returns its twin and the family's name."""


def save(name: str, folder: Path) -> tuple[Any, Stored]:
    """A model of a family, and what is stored."""
    model, _ = FAMILIES[name](folder)
    return model, stored_tensors(folder)


def add_layers(folder: Path, like: str, to: str, first: int, names: tuple[str, ...]) -> None:
    """Layers of multi-token prediction, named `to`, which are like one of a stored model's."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    held = load_file(file)
    for name in [n for n in held if n.startswith(like)]:
        for m in range(LAYERS):
            held[name.replace(like, to.format(first + m))] = new(*held[name].shape).to(
                held[name].dtype
            )
    embed_norm, hidden_norm, proj, norm = names
    hidden = read_config(folder)["hidden_size"]
    for m in range(LAYERS):
        for part in (embed_norm, hidden_norm, norm):
            held[f"{to.format(first + m)}{part}.weight"] = new(hidden)
        held[f"{to.format(first + m)}{proj}.weight"] = new(hidden, 2 * hidden)
    save_file(held, file, metadata={"format": "pt"})
    config = read_config(folder) | {"num_nextn_predict_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
