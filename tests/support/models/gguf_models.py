"""Models of every architecture that is exported to GGUF, a few thousand numbers each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import tiny_model

WORDS = "the cat sat on the mat, and 12 cats saw 345 bats; it's a cat's life!\n"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.125,
    "logits_scaling": 2.0,
}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "cohere": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "gemma": ("gemma", {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 32}),
    "gemma3": ("gemma3", {**GEMMA, "num_hidden_layers": 6, "sliding_window": 32}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere2": (
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "logit_scale": 0.25,
        },
    ),
    "granite": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("granitemoe", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (
        "olmoe",
        {
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "arcee": ("arcee", {}),
    "dots1": ("dots1", SIGMOID | {"num_key_value_heads": 4}),
    "glm4-moe": ("glm4_moe", SIGMOID | {"attention_bias": True, "use_qk_norm": True}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "nemotron": ("nemotron", {"attention_bias": False}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
}


def fill_noise(model: Any) -> None:
    """Add noise to every parameter, norms and biases among them."""
    import torch

    for tensor in model.parameters():
        tensor.add_(torch.randn_like(tensor) * 0.05)


def save(folder: Path, name: str, *, dtype: str = "float32", **more: Any) -> Path:
    """A model of random numbers, norms and biases among them, with a byte-level tokenizer."""
    family, keys = MODELS[name]
    tiny_model(family, folder, sizes=SIZES, seed=7, dtype=dtype, fill=fill_noise, **(keys | more))
    byte_level(folder, int(SIZES["vocab_size"]) - 20)
    return folder


def byte_level(folder: Path, tokens: int) -> None:
    """The files of a byte-level BPE that cuts text as GPT-2 does, with special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_tokens([AddedToken("<mark>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
