"""Tiny models of families that store weights turned, woven or stacked, by transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.models import tiny_text
from tests.support.models.moe_cases import PUBLISHED, publish
from tests.support.models.mtp_models import rename_as_ling, rename_as_mimo
from tests.support.models.tiny_model import fill_tables, tiny_model
from tests.support.models.unequal_layers import block

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
_MIXED = {"mamba_n_heads": 4, "mamba_d_state": 32}

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_ONE_FOR_ALL = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

_GEMMA4 = {
    "intermediate_size": 256,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}

# By family, or family and what is special.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 256},
    "gpt_oss": _GROUPED
    | _EXPERTS
    | {
        "intermediate_size": 96,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4": _GROUPED
    | _EXPERTS
    | {
        "intermediate_size": 256,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "qwen3_next": _GROUPED
    | _DELTA
    | _ONE_FOR_ALL
    | {"intermediate_size": 128, "full_attention_interval": 2},
    "qwen3_5_text": _GROUPED | _DELTA | {"intermediate_size": 128, "full_attention_interval": 2},
    "qwen3_5_moe_text": _GROUPED | _DELTA | _ONE_FOR_ALL | {"full_attention_interval": 2},
    "gemma4": _GEMMA4,
    "gemma4-small": _GEMMA4
    | {
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": tiny_text.VOCABULARY,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4-experts": _GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "mistral4": {
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 128,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "partial_rotary_factor": 0.25,
        "qk_rope_head_dim": 32,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "sliding_window": 16,
        "num_hidden_layers": 3,
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0,
    },
    "nemotron_nas": {
        "head_dim": 64,
        "num_hidden_layers": 4,
        "block_configs": [block(2, 3.0), block(None, 1.0), block(1, None), block(1, 6.0)],
    },
    "phi3": {"num_key_value_heads": 1, "intermediate_size": 256},
    "gpt2": {},
    "cohere": _GROUPED | {"intermediate_size": 256, "use_qk_norm": True},
    "olmo2": _GROUPED | {"intermediate_size": 256},
    "olmo3": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "cohere2": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "seed_oss": _GROUPED | {"intermediate_size": 256, "attention_bias": True},
    "ernie4_5": _GROUPED | {"intermediate_size": 256, "use_bias": True},
    "nemotron_h": _GROUPED
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "pad_token_id": 0,
    },
    "granitemoehybrid": _MIXED
    | {
        "num_key_value_heads": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoehybrid-experts": _MIXED
    | _EXPERTS
    | {
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "shared_intermediate_size": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bamba": _MIXED
    | {"num_key_value_heads": 1, "intermediate_size": 256, "attn_layer_indices": [1]},
    "falcon_h1": _MIXED | {"num_key_value_heads": 1, "intermediate_size": 256, "mamba_d_ssm": 128},
}

_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 8}
_SIGMOID = {
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}

_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}

_CONV = ["conv", "full_attention"]

MORE: dict[str, dict[str, Any]] = {
    "phimoe": _GROUPED
    | _EXPERTS
    | {"intermediate_size": 64, "attention_bias": True, "lm_head_bias": True},
    "granitemoe": _EXPERTS | {"num_key_value_heads": 1, "intermediate_size": 64},
    "granitemoeshared": _EXPERTS
    | {"num_key_value_heads": 1, "intermediate_size": 64, "shared_intermediate_size": 128},
    "granite_swa": {"num_key_value_heads": 1, "intermediate_size": 256, "sliding_window": 16},
    "granitemoe_swa": _EXPERTS
    | {"num_key_value_heads": 1, "intermediate_size": 64, "sliding_window": 16},
    "hunyuan_v1_dense": _GROUPED | {"intermediate_size": 256},
    "hunyuan_v1_moe": _GROUPED
    | {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "solar_open": _GROUPED | _SIGMOID | {"n_routed_experts": 4},
    "exaone_moe": _GROUPED
    | _SIGMOID
    | {"intermediate_size": 128, "num_experts": 4, "sliding_window": 16},
    "openelm": {
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 1.5],
        "ffn_dim_divisor": 64,
        "head_dim": 64,
    },
    "apertus": _GROUPED | {"intermediate_size": 256},
    "glm": _GROUPED | {"intermediate_size": 256},
    "phi": {"num_key_value_heads": 1, "intermediate_size": 256},
    "hyperclovax": _GROUPED | {"intermediate_size": 256},
    "vaultgemma": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "cwm": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "ministral": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "youtu": _LATENT | {"intermediate_size": 256},
    "olmo": {"num_key_value_heads": 1, "intermediate_size": 256},
    "nanochat": {"num_key_value_heads": 1, "intermediate_size": 256},
    "stablelm": {"num_key_value_heads": 1, "intermediate_size": 256},
    "falcon": {"ffn_hidden_size": 256},
    "persimmon": {"intermediate_size": 256},
    "gptj": {"n_inner": 256, "rotary_dim": 32},
    "bloom": {},
    "mpt": {},
    "opt": {"ffn_dim": 256},
    "codegen": {"n_inner": 256, "rotary_dim": 32},
    "gpt_bigcode": {"n_inner": 256},
    "gpt_neo": {"intermediate_size": 256, "attention_types": [[["global", "local"], 1]]},
    "jais2": {"num_key_value_heads": 1, "intermediate_size": 256},
    "afmoe": _GROUPED
    | {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 4}
    | {"num_experts_per_tok": 2, "num_shared_experts": 1, "sliding_window": 16},
    "lfm2": {"num_key_value_heads": 1, "intermediate_size": 256, "layer_types": _CONV},
    "lfm2_moe": {"num_key_value_heads": 1, "intermediate_size": 128, "layer_types": _CONV}
    | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    | {"num_dense_layers": 1},
    "flex_olmo": _GROUPED | {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": _GROUPED
    | {"moe_intermediate_size": 64, "intermediate_size": 128}
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1},
    "llama": _GROUPED | {"intermediate_size": 256},
    "arcee": _GROUPED | {"intermediate_size": 256},
    "exaone4": _GROUPED | {"intermediate_size": 256, "sliding_window": 16, "num_hidden_layers": 4},
    "gemma": _GROUPED | {"intermediate_size": 256},
    "gemma2": _GROUPED | {"intermediate_size": 256, "sliding_window": 16},
    "gemma3": _GROUPED
    | {
        "intermediate_size": 256,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": _GROUPED | {"intermediate_size": 256},
    "granite": {"num_key_value_heads": 1, "intermediate_size": 256},
    "helium": _GROUPED | {"intermediate_size": 256},
    "ministral3": _GROUPED | {"intermediate_size": 256},
    "nemotron": _GROUPED | {"intermediate_size": 256},
    "qwen2": {"num_key_value_heads": 1, "intermediate_size": 256},
    "qwen3": _GROUPED | {"intermediate_size": 256},
    "smollm3": {"num_key_value_heads": 1, "intermediate_size": 256, "num_hidden_layers": 4},
    "starcoder2": {"num_key_value_heads": 1, "intermediate_size": 256},
    "mixtral": _EXPERTS | {"num_key_value_heads": 1, "intermediate_size": 64},
    "olmoe": {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": _GROUPED | _EXPERTS | {"intermediate_size": 64, "rotary_dim": 32},
    "ernie4_5_moe": {"num_key_value_heads": 1, "intermediate_size": 128}
    | {"moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    | {"moe_layer_start_index": 1},
    "qwen2_moe": _ONE_FOR_ALL | {"num_key_value_heads": 1, "intermediate_size": 128},
    "qwen3_moe": _GROUPED
    | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    "dots1": _GROUPED | _SIGMOID | _SHARED | {"intermediate_size": 128, "norm_topk_prob": True},
    "glm4_moe": _GROUPED | _SIGMOID | _SHARED | {"intermediate_size": 128},
    "deepseek_v2": _LATENT | _SIGMOID | _SHARED | {"intermediate_size": 128},
    "deepseek_v3": _LATENT | _SIGMOID | _SHARED | {"intermediate_size": 128},
    "deepseek_v32": _LATENT | _SIGMOID | _SHARED | _INDEXER | {"intermediate_size": 128},
    "glm_moe_dsa": _LATENT
    | _SIGMOID
    | _SHARED
    | _INDEXER
    | {"intermediate_size": 128, "indexer_types": ["full", "shared"]},
    "mimo_v2_flash": _SIGMOID
    | {"num_key_value_heads": 1, "head_dim": 64, "v_head_dim": 32, "sliding_window": 16}
    | {"intermediate_size": 128, "n_routed_experts": 4}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "kimi_linear": {k: v for k, v in _LATENT.items() if k != "q_lora_rank"}
    | {"intermediate_size": 128, "moe_intermediate_size": 64, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "n_shared_experts": 1, "pad_token_id": 0}
    | {"linear_num_heads": 2, "linear_head_dim": 64}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "glm4_moe_lite": _LATENT
    | _SIGMOID
    | {k: v for k, v in _SHARED.items() if k != "first_k_dense_replace"}
    | {"intermediate_size": 128},
    "bailing_moe_v2": _GROUPED
    | _SIGMOID
    | _SHARED
    | {"intermediate_size": 128, "use_qk_norm": True, "attention_bias": False},
    "mimo": {"num_key_value_heads": 1, "intermediate_size": 256, "tie_word_embeddings": False},
}
"""Families of the slow tests."""

FAMILIES |= MORE

BY_RENAMING: dict[str, tuple[str, Callable[[Path], None]]] = {
    "bailing_moe_v2": ("glm4_moe", rename_as_ling),
    "mimo": ("qwen2", rename_as_mimo),
}
"""Families that transformers has no class of, by one that computes the same."""


def fill_matrices(model: Any) -> None:
    """Matrices, biases, sinks and tables; norms stay as they are."""
    import torch

    fill_tables(model)
    for name, p in model.named_parameters():
        if p.dim() > 1 or "bias" in name or "sinks" in name:
            p.copy_(torch.empty(p.shape).normal_(0, 0.05))


SHORT_V4: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
}
"""What `save` takes for a DeepSeek-V4 of two layers."""


def save(family: str, folder: Path, **more: Any) -> Path:
    """A Hugging Face folder in bfloat16 with random weights, and a tokenizer of bytes."""
    keys = FAMILIES[family] | more
    name, rename = BY_RENAMING.get(family, (family.partition("-")[0], None))
    tiny_model(name, folder, sizes=_COMMON, dtype="bfloat16", fill=fill_matrices, **keys)
    if name in PUBLISHED:
        publish(name, folder)
    if rename is not None:
        rename(folder)
    tiny_text.save_tokenizer(folder)
    return folder


def read_quantization_config(folder: Path) -> dict[str, Any]:
    """What config.json says of the quantization."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found["quantization_config"]  # type: ignore[no-any-return]
