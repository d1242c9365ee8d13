"""Tiny models of families that store weights turned, woven or stacked, by transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models import tiny_text

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": tiny_text.VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": tiny_text.END,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": 1, "head_dim": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"intermediate_size": 256}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _GROUPED
        | _EXPERTS
        | {
            "intermediate_size": 96,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _GROUPED
        | _EXPERTS
        | {
            "intermediate_size": 256,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {"num_key_value_heads": 1, "intermediate_size": 256},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64},
    ),
}


def save(family: str, folder: Path, **more: Any) -> Path:
    """A Hugging Face folder in bfloat16 with random weights, and a tokenizer of bytes."""
    import torch
    import transformers

    architecture, config, sizes = FAMILIES[family]
    named = {k: v for k, v in _COMMON.items() if family != "gpt2" or "token_id" in k or k[0] == "v"}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**(named | sizes | more))
    model = getattr(transformers, architecture)(made)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 or "bias" in name or "sinks" in name:
                p.normal_(0, 0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_text.save_tokenizer(folder)
    return folder


def said(folder: Path) -> dict[str, Any]:
    """What config.json says of the quantization."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found["quantization_config"]  # type: ignore[no-any-return]
