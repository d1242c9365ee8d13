"""A T5 of a few thousand parameters that reads and writes text: every byte is a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import tiny_model

END, PAD, NUM_SENTINELS = 256, 257, 12
VOCABULARY = 272
SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 12,  # 4 heads of which are not d_model
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": END,
}
FLAN: dict[str, Any] = {
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "num_decoder_layers": 3,
}
KEYS: dict[str, dict[str, Any]] = {"t5": {}, "flan": FLAN}
MODEL_TYPES = ("mt5", "umt5")
"""Families that are like T5; their tiny models have an output layer of its own."""


def fill(model: Any) -> None:
    """Random weights whose layers, not the last token alone, decide what comes next."""
    import torch

    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
            continue
        size = 1.0 if name.endswith((".o.weight", ".wo.weight")) else 0.3
        if name.endswith("norm.weight"):
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
        else:
            parameter.copy_(torch.randn(parameter.shape) * size)


def untie(model: Any) -> None:
    """Give the output layer a matrix of its own, as published mT5s have."""
    import torch

    model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().flip(0).clone())


def fill_untied(model: Any) -> None:
    """Random weights as of `fill`, and an output layer of its own."""
    untie(model)
    fill(model)


def save(folder: Path, family: str = "t5", **keys: Any) -> Any:
    """A Hugging Face folder with random weights and a tokenizer; returns transformers' model."""
    model = tiny_model(
        family, folder, sizes=SIZES, fill=fill if family == "t5" else fill_untied, **keys
    )
    save_tokenizer(folder)
    return model.eval()


def save_tokenizer(folder: Path, *, num_sentinels: int = NUM_SENTINELS) -> None:
    """Write tokenizer files: 256 bytes, `</s>` and `<pad>`, and sentinels; it ends every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    sentinels = [f"<extra_id_{n}>" for n in range(num_sentinels)]
    made.add_special_tokens([AddedToken(t, special=True) for t in ("</s>", "<pad>", *sentinels)])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
