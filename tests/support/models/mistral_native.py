"""A tiny Mistral Large 3 as it ships: Mistral's own names of tensors and keys, and params.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.moe_cases import MISTRAL4, save

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate.": "gate.",
    "mlp.shared_experts": "shared_experts",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def save_large_3(folder: Path, twin: Path) -> tuple[Any, dict[str, Any]]:
    """A Mistral Large 3 as it ships: Mistral's names of tensors and keys, and a vision tower.

    The same text model by transformers is saved to `twin`; returns it, and the tensors there.
    """
    yarn = {k: v for k, v in MISTRAL4["rope_parameters"].items() if "mscale" not in k}
    keys = MISTRAL4 | {"rope_parameters": yarn | {"attention_factor": 1.0}}
    model = save(("mistral4", "Mistral4", keys), twin)
    held = load_file(twin / "model.safetensors")
    native = {}
    for name, tensor in held.items():
        for e in range(len(tensor) if ".experts." in name else 0):
            parts = tensor[e].chunk(2) if "gate_up" in name else (tensor[e],)
            first = f"{name.partition('.mlp.')[0]}.experts.{e}.".replace("model.layers", "layers")
            for part, of in zip(("w1", "w3") if len(parts) == 2 else ("w2",), parts, strict=True):
                native[f"{first}{part}.weight"] = of.clone()
        if ".experts." not in name:
            for old, new in _NAMES.items():
                name = name.replace(old, new)
            native[name] = tensor
    generator = torch.Generator().manual_seed(3)
    for name in (
        "vision_encoder.ln_pre.weight",
        "vision_language_adapter.w_in.weight",
        "patch_merger.merging_layer.weight",
    ):
        native[name] = torch.randn(8, 8, generator=generator).bfloat16()
    folder.mkdir()
    save_file(native, folder / "consolidated.safetensors", metadata={"format": "pt"})
    params = {
        "dim": 32,
        "hidden_dim": 40,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 12,
        "norm_eps": 1e-6,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "tied_embeddings": False,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_theta": 10000.0,
        "yarn": {"alpha": 1, "apply_scale": False, "beta": 32, "factor": 4}
        | {"original_max_position_embeddings": 4},
        "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 4},
        "moe": {
            "expert_hidden_dim": 24,
            "expert_model_parallel": 1,
            "expert_parallel": 1,
            "first_k_dense_replace": 1,
            "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "route_every_n": 1,
            "routed_scale": 1.0,
        },
        "vision_encoder": {"hidden_size": 8},
    }
    (folder / "params.json").write_text(json.dumps(params))
    return model, held
