"""Tiny models of transformers that score labels, by family, each with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import tiny_text

SIZES: dict[str, Any] = {
    "vocab_size": tiny_text.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "vocab_size": tiny_text.VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 96,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LABEL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", DECODER | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", GPT2),
    "gemma2": ("Gemma2", DECODER),
    "mixtral": ("Mixtral", DECODER | {"num_local_experts": 4}),
    "bert_post_norm": ("Bert", SIZES | NO_DROPOUT),
    "roberta": ("Roberta", SIZES | NO_DROPOUT | {"max_position_embeddings": 98}),
    "modernbert": ("ModernBert", SIZES | {"classifier_pooling": "cls"}),
}


def save_label_model(family: str, folder: Path, *, num_labels: int = 3, **more: Any) -> Any:
    """A model with random weights, which is returned, in a folder with a tokenizer."""
    import torch
    import transformers

    name, sizes = LABEL_MODELS[family]
    torch.manual_seed(0)
    special = {"pad_token_id": 256, "bos_token_id": 256, "eos_token_id": tiny_text.END}
    if family == "roberta":
        special["pad_token_id"] = 1  # positions are counted from it
    if family == "modernbert":
        special |= {"cls_token_id": 256, "sep_token_id": tiny_text.END}
    names = {n: f"label {n}" for n in range(num_labels)}
    config = getattr(transformers, f"{name}Config")(
        **sizes, **special, id2label=names, label2id={v: k for k, v in names.items()}, **more
    )
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    tiny_text.save_tokenizer(folder)
    return model
