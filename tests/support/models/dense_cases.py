"""Dense families as transformers saves them, with the features that their configurations switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
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

    def __str__(self) -> str:
        said = ",".join(f"{k}={v}" for k, v in self.keys.items() if not isinstance(v, list | dict))
        return f"{self.model}({said})"


WINDOWED = {"use_sliding_window": True, "sliding_window": 16}

BERT = "MegatronBert"

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CASES = [
    Case(*QWEN2, UNTIED),
    Case(*QWEN2, TIED | WINDOWED | {"max_window_layers": 1, "num_key_value_heads": 4}),
    Case(*QWEN3, UNTIED | {"head_dim": 16}),
    Case(*QWEN3, TIED | BIASED | {"head_dim": 8, "rope_parameters": LLAMA3}),
    Case(*GEMMA, TIED | {"head_dim": 16}),
    Case(*GEMMA, UNTIED | BIASED | {"head_dim": 8, "num_key_value_heads": 1}),
    Case(*GEMMA2, TIED | {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 4}),
    Case(*GEMMA2, UNTIED | BIASED | {"head_dim": 8, "final_logit_softcapping": None}),
    Case(*GEMMA3, TIED | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16}),
    Case(*GEMMA3, UNTIED | {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    Case(*PHI3, UNTIED),
    Case(*PHI3, TIED | {"sliding_window": 16, "num_key_value_heads": 4}),
    Case(*GPT2, TIED),
    Case(*GPT2, UNTIED | {"activation_function": "gelu"}),
    Case(*NEOX, UNTIED),
    Case(*NEOX, TIED | {"attention_bias": False, "use_parallel_residual": False}),
    Case("bert", "MegatronBertForMaskedLM", BERT, TIED),
    Case("bert", "MegatronBertForMaskedLM", BERT, UNTIED | {"type_vocab_size": 3}),
    Case("bert", "MegatronBertForPreTraining", BERT, TIED),
    Case(*GRANITE, UNTIED | {"embedding_multiplier": 12.0}),
    Case(*GRANITE, TIED | BIASED | {"mlp_bias": True}),
    Case(*SMOLLM3, TIED | {"num_hidden_layers": 4}),
    Case(*STARCODER2, TIED),
    Case(*STARCODER2, UNTIED | {"use_bias": False, "sliding_window": 32}),
    Case(*NEMOTRON, UNTIED | {"head_dim": 8}),
    Case(*NEMOTRON, TIED | BIASED | {"mlp_bias": True, "head_dim": 8}),
    Case("llama", "MistralForCausalLM", "Mistral", {"sliding_window": 32, "head_dim": 8}),
]


def made(case: Case) -> Any:
    """The transformers configuration of a case."""
    sizes = GPT2_SIZES if case.family == "gpt2" else SIZES
    if case.family in ("gpt_neox", "bert"):
        sizes = {k: v for k, v in sizes.items() if k != "num_key_value_heads"}
    return getattr(transformers, f"{case.config}Config")(**(sizes | case.keys))


def save(case: Case, folder: Path) -> Any:
    """A random model of a case, saved by transformers; norms and biases are random too."""
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(made(case))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    return model
