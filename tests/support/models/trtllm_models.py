"""Tiny models of the legacy families, and their weights under the names `joined` gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.folders import write_folder
from tests.support.models import tiny_llama

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RENAMED = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "post_layernorm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "block_sparse_moe.gate": "router",
    "block_sparse_moe.experts": "experts",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def mixtral(folder: Path, seed: int = 0) -> Path:
    """Four experts, of which each token has two."""
    c = MIXTRAL
    h, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    shapes |= {"lm_head.weight": (v, h), "model.norm.weight": (h,)}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (h,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
        for name, rows in {"q": 64, "k": 32, "v": 32, "o": h}.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, 64)
        moe = f"{at}.block_sparse_moe"
        shapes[f"{moe}.gate.weight"] = (4, h)
        for e in range(4):
            shapes[f"{moe}.experts.{e}.w1.weight"] = shapes[f"{moe}.experts.{e}.w3.weight"] = (f, h)
            shapes[f"{moe}.experts.{e}.w2.weight"] = (h, f)
    g = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=g).mul(0.1).bfloat16() for n, s in shapes.items()}
    return write_folder(folder, c, tensors)


def llama(folder: Path, **more: Any) -> Path:
    """Four layers, two heads of keys and values under four of queries; groups of 32 divide all."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 101,
    }
    return tiny_llama.save(folder, **(sizes | more))


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder of Llama's or Mixtral's layout, as `joined` calls them."""
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removeprefix("model.")
        for old, new in RENAMED.items():
            short = short.replace(f"{old}.", f"{new}.")
        out[short] = tensor
    return out
