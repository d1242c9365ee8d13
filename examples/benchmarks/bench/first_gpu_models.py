"""Models of `first_gpu.py`: random weights in the shapes that people train, and a text for them.

python examples/benchmarks/bench/first_gpu_models.py NAME FOLDER [--tiny]
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

_GATED: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192}


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return _GATED | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
    }


_STATES = {"mamba_n_heads": 32, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_expand": 2}
_DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("llama", _llama(30, 576, 1536, 9, 3, 49152) | {"tie_word_embeddings": True}),
    "1b": ("llama", _llama(16, 2048, 8192, 32, 8, 128256) | {"tie_word_embeddings": True}),
    "large": ("llama", _llama(8, 4096, 14336, 32, 8, 32768)),
    "windowed": ("mistral", _llama(4, 1024, 3584, 8, 2, 32768) | {"sliding_window": 512}),
    "experts": (
        "qwen3_moe",
        _llama(8, 1024, 3072, 16, 4, 32768)
        | {"moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "mamba": (
        "bamba",
        _llama(4, 1024, 2048, 8, 2, 32768) | _STATES | {"attn_layer_indices": [3]},
    ),
    "delta": ("qwen3_5_text", _llama(4, 1024, 2048, 8, 2, 32768) | _DELTA),
}
"""By name: transformers' family and its settings. `large` has an 8B's layers, 2 billion weights."""

_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
}
_TINY_OF: dict[str, dict[str, Any]] = {
    "experts": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "windowed": {"sliding_window": 16},
    "mamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
    },
    "delta": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def save_model(name: str, folder: Path, *, is_tiny: bool) -> None:
    """Write a Hugging Face folder in bfloat16 with a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, keys = MODELS[name]
    if is_tiny:
        keys = keys | _TINY | _TINY_OF.get(name, {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, bos_token_id=256, eos_token_id=257, **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes, `<s>` and `</s>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_texts(long: Path, short: Path) -> None:
    """Write documents to train on, of different lengths, and a page to evaluate on."""
    text = (files("megtool.data") / "founding_documents.txt").read_text()
    documents = [p for p in text.split("\n\n") if len(p) > 40]
    short.write_text("\n".join(documents)[:4000])
    long.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))


def main() -> None:
    """Write the model that the command line names."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("name", choices=MODELS)
    options.add_argument("folder", type=Path)
    options.add_argument("--tiny", action="store_true")
    given = options.parse_args()
    save_model(given.name, given.folder, is_tiny=given.tiny)


if __name__ == "__main__":
    main()
