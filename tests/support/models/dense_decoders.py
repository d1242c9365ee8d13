"""Dense families by transformers and by megtool, with the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.models.dense_cases import (
    ALPHA,
    CONV,
    FULL,
    GEMMA4,
    GEMMA4_SMALL,
    LATENT,
    NEO,
    NEW_FALCON,
    SWASH,
    TWO_BASES,
)
from tests.support.models.openelm_model import LAYERS
from tests.support.models.tiny_model import BIASED, TIED, UNTIED, Case, fill_tables
from tests.support.models.unequal_layers import BLOCKS

transformers = pytest.importorskip("transformers")


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

YARN_SCALED = {
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}

# Phi-3 turns a part of each head: 8 of 10 elements.
PARTIAL = {"hidden_size": 40, "original_max_position_embeddings": 16}

WINDOWED = {"use_sliding_window": True, "sliding_window": 5}

LAYERS4 = {"num_hidden_layers": 4}

MULTIPLIED = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 5.0,
}

BY_KIND = {
    "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
    }
}

MIXED = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

MUP = MIXED | {
    "mamba_d_ssm": 64,
    "mamba_rms_norm": True,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.4, 1.1],
    "mlp_multipliers": [0.8, 1.5],
}

DELTA = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}

LAYERS6 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
}

CASES = [
    Case("llama", UNTIED),
    Case("llama", TIED | BIASED | {"mlp_bias": True, "head_dim": 12}),
    Case("llama", UNTIED | {"num_key_value_heads": 4}),
    Case("llama", UNTIED | LLAMA3, "llama3"),
    Case("llama", UNTIED | rope("linear", factor=3.0), "linear"),
    Case("llama", UNTIED | rope("dynamic", factor=3.0) | {"max_position_embeddings": 8}, "dynamic"),
    Case("llama", UNTIED | rope("yarn", **YARN), "yarn"),
    Case(
        "llama", UNTIED | rope("yarn", **YARN, attention_factor=1.3, beta_fast=4.0), "yarn-factor"
    ),
    Case("llama", UNTIED | rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.8), "yarn-mscale"),
    Case("mistral", UNTIED | {"sliding_window": 5, "head_dim": 8}),
    Case("qwen2", UNTIED),
    Case("qwen2", TIED | WINDOWED | {"max_window_layers": 1, "num_key_value_heads": 4}),
    Case("qwen3", UNTIED | {"head_dim": 16}),
    Case("qwen3", TIED | BIASED | WINDOWED | {"head_dim": 8, "max_window_layers": 0}),
    Case("qwen3_5_text", TIED | DELTA, "delta"),
    Case("gemma", TIED | {"head_dim": 16}),
    Case(
        "gemma", UNTIED | BIASED | {"head_dim": 8, "num_key_value_heads": 1, "hidden_act": "gelu"}
    ),
    Case("gemma2", TIED | LAYERS4 | {"head_dim": 16, "sliding_window": 5}),
    Case("gemma2", UNTIED | {"head_dim": 8, "final_logit_softcapping": None}),
    Case("gemma2", TIED | {"head_dim": 8, "attn_logit_softcapping": 2.0}),
    Case("gemma2", TIED | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 7}),
    Case("gemma3", TIED | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 5}),
    Case("gemma3", UNTIED | {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    Case("gemma3", TIED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    Case("phi3", UNTIED),
    Case("phi3", TIED | {"sliding_window": 5, "num_key_value_heads": 4}),
    Case(
        "phi3",
        UNTIED | PARTIAL | rope("longrope", **LONG, partial_rotary_factor=0.8),
        "longrope",
    ),
    Case("gpt2", TIED),
    Case("gpt2", UNTIED | {"activation_function": "gelu"}),
    Case("gpt_neox", UNTIED),
    Case("gpt_neox", TIED | {"attention_bias": False, "use_parallel_residual": False}),
    Case("gpt_neox", UNTIED | {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}),
    Case("granite", UNTIED),
    Case("granite", TIED | BIASED | MULTIPLIED | {"mlp_bias": True}, "multiplied"),
    Case("bamba", TIED | MIXED | {"attn_layer_indices": [1], "mlp_bias": True}),
    Case("falcon_h1", UNTIED | MUP | {"mamba_d_ssm": 48, "mamba_rms_norm": False}),
    Case("falcon_h1", TIED | BIASED | MUP | {"mlp_bias": True}),
    Case("falcon_h1", UNTIED | MUP | {"mamba_norm_before_gate": False}, "gate-first"),
    Case("smollm3", TIED | LAYERS4),
    Case("smollm3", UNTIED | LAYERS4 | WINDOWED | {"no_rope_layers": [0, 1, 1, 0]}),
    Case("starcoder2", TIED),
    Case("starcoder2", UNTIED | {"use_bias": False, "sliding_window": 5}),
    Case("nemotron", UNTIED | {"head_dim": 8}),
    Case("nemotron", TIED | BIASED | {"mlp_bias": True, "head_dim": 8}),
    Case(
        "ministral3",
        UNTIED | rope("yarn", **YARN_SCALED) | {"head_dim": 8},
        "scaled",
    ),
    Case("seed_oss", UNTIED | {"head_dim": 16, "attention_out_bias": True}),
    Case("ernie4_5", TIED | {"head_dim": 8, "use_bias": True}),
    Case("glm4", UNTIED | {"head_dim": 8}),
    Case("olmo2", UNTIED),
    Case("olmo3", UNTIED | LAYERS4 | BY_KIND | {"sliding_window": 5}),
    Case("exaone4", TIED | LAYERS4 | {"sliding_window": 5}),
    Case("exaone4", UNTIED | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Case("cohere", TIED | {"logit_scale": 0.5}),
    Case("cohere", UNTIED | BIASED | {"use_qk_norm": True, "logit_scale": 1.5}, "per-head"),
    Case("cohere2", TIED | LAYERS4 | {"sliding_window": 5, "logit_scale": 0.5}),
    Case("nemotron_nas", UNTIED | LAYERS4 | {"block_configs": BLOCKS}, "nemotron_nas"),
    Case("gemma4", TIED | GEMMA4 | LAYERS4, "gemma4"),
    Case("gemma4", UNTIED | BIASED | GEMMA4 | {"attention_k_eq_v": False, "layer_types": FULL * 2}),
    Case("gemma4", TIED | GEMMA4_SMALL | LAYERS6, "gemma4-small"),
    Case("arcee", UNTIED | BIASED | {"mlp_bias": True}, "arcee"),
    Case("helium", TIED | {"head_dim": 8}, "helium"),
]

ALIBI = [
    Case("bloom", TIED, "bloom"),
    Case("bloom", UNTIED | {"n_head": 6, "hidden_size": 48}, "bloom-6"),
    Case("mpt", TIED, "mpt"),
]
"""Positions are slopes of scores; six heads are no power of two."""

MORE = [
    Case("hunyuan_v1_dense", UNTIED | BIASED | ALPHA | {"head_dim": 12}, "hunyuan_v1_dense"),
    Case("stablelm", UNTIED, "stablelm"),
    Case(
        "stablelm",
        TIED | {"use_qkv_bias": True, "use_parallel_residual": True},
        "stablelm-parallel",
    ),
    Case("openelm", TIED | LAYERS, "openelm"),
    Case("apertus", UNTIED | BIASED | LLAMA3, "apertus"),
    Case("glm", UNTIED | {"head_dim": 8}, "glm"),
    Case("cwm", UNTIED | LAYERS4 | {"head_dim": 8, "sliding_window": 5}, "cwm"),
    Case("ministral", TIED | {"head_dim": 16, "sliding_window": 5}, "ministral"),
    Case("phi", UNTIED, "phi"),
    Case("falcon", TIED, "falcon-7b"),
    Case("falcon", UNTIED | NEW_FALCON, "falcon-40b"),
    Case("falcon", UNTIED | {"parallel_attn": False, "bias": True}, "falcon-sequential"),
    Case("persimmon", UNTIED, "persimmon"),
    Case("gptj", UNTIED | {"rotary_dim": 4}, "gptj"),
    Case("phi", UNTIED | {"qk_layernorm": True}, "phi-qk-norms"),
    Case("stablelm", UNTIED | {"qk_layernorm": True}, "stablelm-qk-norms"),
    Case("hyperclovax", UNTIED | BIASED | MULTIPLIED, "hyperclovax"),
    Case("vaultgemma", TIED | LAYERS4 | {"head_dim": 8, "sliding_window": 5}, "vaultgemma"),
    Case("youtu", TIED | LATENT, "youtu"),
    Case("olmo", TIED | BIASED, "olmo"),
    Case("nanochat", UNTIED, "nanochat"),
    *ALIBI,
    Case("opt", TIED, "opt"),
    Case("codegen", UNTIED | {"rotary_dim": 4}, "codegen"),
    Case("gpt_bigcode", TIED, "gpt_bigcode"),
    Case("gpt_bigcode", UNTIED | {"multi_query": False}, "gpt_bigcode-heads"),
    Case("gpt_neo", TIED | NEO, "gpt_neo"),
    Case("jais2", UNTIED, "jais2"),
    Case("granite_swa", TIED | SWASH | {"attention_multiplier": 0.2}, "granite_swa"),
    Case("lfm2", TIED | CONV, "lfm2"),
    Case("granite_swa", UNTIED | TWO_BASES | {"attention_multiplier": 0.2}, "granite_swa-bases"),
]
"""Cases of the slow tests, of which the fast ones compute the logits alone."""


def fill_spread(model: Any) -> None:
    """Add noise to every parameter, norms and biases among them.

    States decay slowly: where they are soon forgotten, gradients of the decay are all rounding.
    """
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 0.25
        around = parameter - 3.0 if name.endswith("A_log") else parameter
        parameter.copy_(around + spread * torch.randn(parameter.shape))
    fill_tables(model)


def transformers_model(case: Case) -> Any:
    """A random model of a case by transformers' own class; norms and biases are random too."""
    return case.build(fill=fill_spread, attn_implementation="eager").eval()


def largest(a: Any, b: Any) -> float:
    """The largest difference, which has to be a number."""
    difference = float((a - b).detach().abs().max())
    assert math.isfinite(difference)
    return difference
