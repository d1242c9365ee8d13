"""Models of every architecture that is exported to GGUF, a few thousand numbers each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_theta": 1e6}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {**GEMMA, "sliding_window": 32}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 6, "sliding_window": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
}


def save(folder: Path, name: str, *, dtype: str = "float32", **more: Any) -> Path:
    """A model of random numbers, norms and biases among them, with a byte-level tokenizer."""
    import torch
    import transformers

    kind, own = MODELS[name]
    config = getattr(transformers, kind)(**(SIZES | own | more))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
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
