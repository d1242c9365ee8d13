"""Dense families by transformers and by megtool, with the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.models.dense_families import (
    BIASED,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT2_SIZES,
    GRANITE,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    NEOX,
    PHI3,
    QWEN2,
    QWEN3,
    SIZES,
    SMOLLM3,
    STARCODER2,
    TIED,
    UNTIED,
)

transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Case:
    """A family's model class, and what its tiny configuration says besides sizes."""

    family: str
    model: str
    config: str
    keys: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        said = self.name or ",".join(f"{k}={v}" for k, v in self.keys.items())
        return f"{self.family}({said})"


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

CASES = [
    Case(*LLAMA, UNTIED),
    Case(*LLAMA, TIED | BIASED | {"mlp_bias": True, "head_dim": 12}),
    Case(*LLAMA, UNTIED | {"num_key_value_heads": 4}),
    Case(*LLAMA, UNTIED | LLAMA3, "llama3"),
    Case(*LLAMA, UNTIED | rope("linear", factor=3.0), "linear"),
    Case(*LLAMA, UNTIED | rope("dynamic", factor=3.0) | {"max_position_embeddings": 8}, "dynamic"),
    Case(*LLAMA, UNTIED | rope("yarn", **YARN), "yarn"),
    Case(*LLAMA, UNTIED | rope("yarn", **YARN, attention_factor=1.3, beta_fast=4.0), "yarn-factor"),
    Case(*LLAMA, UNTIED | rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.8), "yarn-mscale"),
    Case(*MISTRAL, UNTIED | {"sliding_window": 5, "head_dim": 8}),
    Case(*QWEN2, UNTIED),
    Case(*QWEN2, TIED | WINDOWED | {"max_window_layers": 1, "num_key_value_heads": 4}),
    Case(*QWEN3, UNTIED | {"head_dim": 16}),
    Case(*QWEN3, TIED | BIASED | WINDOWED | {"head_dim": 8, "max_window_layers": 0}),
    Case(*GEMMA, TIED | {"head_dim": 16}),
    Case(*GEMMA, UNTIED | BIASED | {"head_dim": 8, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    Case(*GEMMA2, TIED | LAYERS4 | {"head_dim": 16, "sliding_window": 5}),
    Case(*GEMMA2, UNTIED | {"head_dim": 8, "final_logit_softcapping": None}),
    Case(*GEMMA2, TIED | {"head_dim": 8, "attn_logit_softcapping": 2.0}),
    Case(*GEMMA2, TIED | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 7}),
    Case(*GEMMA3, TIED | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 5}),
    Case(*GEMMA3, UNTIED | {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    Case(*GEMMA3, TIED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    Case(*PHI3, UNTIED),
    Case(*PHI3, TIED | {"sliding_window": 5, "num_key_value_heads": 4}),
    Case(
        *PHI3,
        UNTIED | PARTIAL | rope("longrope", **LONG, partial_rotary_factor=0.8),
        "longrope",
    ),
    Case(*GPT2, TIED),
    Case(*GPT2, UNTIED | {"activation_function": "gelu"}),
    Case(*NEOX, UNTIED),
    Case(*NEOX, TIED | {"attention_bias": False, "use_parallel_residual": False}),
    Case(*NEOX, UNTIED | {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}),
    Case(*GRANITE, UNTIED),
    Case(*GRANITE, TIED | BIASED | MULTIPLIED | {"mlp_bias": True}, "multiplied"),
    Case(*SMOLLM3, TIED | LAYERS4),
    Case(*SMOLLM3, UNTIED | LAYERS4 | WINDOWED | {"no_rope_layers": [0, 1, 1, 0]}),
    Case(*STARCODER2, TIED),
    Case(*STARCODER2, UNTIED | {"use_bias": False, "sliding_window": 5}),
    Case(*NEMOTRON, UNTIED | {"head_dim": 8}),
    Case(*NEMOTRON, TIED | BIASED | {"mlp_bias": True, "head_dim": 8}),
]


def theirs(case: Case) -> Any:
    """A random model of a case by transformers' own class; norms and biases are random too."""
    torch.manual_seed(0)
    sizes = GPT2_SIZES if case.family == "gpt2" else SIZES
    if case.family == "gpt_neox":
        sizes = {k: v for k, v in sizes.items() if k != "num_key_value_heads"}
    config = getattr(transformers, f"{case.config}Config")(**(sizes | case.keys))
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.25
            parameter.copy_(parameter + spread * torch.randn(parameter.shape))
    return model


def largest(a: Any, b: Any) -> float:
    """The largest difference, which has to be a number."""
    difference = float((a - b).detach().abs().max())
    assert math.isfinite(difference)
    return difference
