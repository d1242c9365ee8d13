"""Byte-level tokenizers as GPT-2's, which cut texts in the ways that llama.cpp has names for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = (
    "the cats' 12345 bats, it's THE cat!\r\n\n  \t x",
    "\u00e9clair e\u0301clair na\u00efve \u4f60\u597d\u4e16\u754c \u3053\u3093",
    "12\u0663 \u2264\u2265 (the)cat [sat]mat",
)
"""Texts that pre-tokenizers cut in different ways."""
WORDS = "the cat sat on the mat, and 12 cats saw 345 bats; it's a cat's life!\n"


def save(folder: Path, tokens: int) -> None:
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


def deepseek_cuts() -> list[dict[str, Any]]:
    """The stages of DeepSeek-V3's pre-tokenizer, with ends of lines as its file has them."""
    patterns = (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
        "\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    )
    return [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]


def qwen35_cuts() -> list[dict[str, Any]]:
    """The stages of Qwen3.5's, as transformers has them."""
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    return [{"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}, "behavior": "Isolated"}]


CUTS = {"deepseek-v3": deepseek_cuts, "qwen35": qwen35_cuts}
"""By llama.cpp's name of the pre-tokenizer."""


def cut_as(folder: Path, name: str) -> None:
    """Let the tokenizer in a folder cut text in this way."""
    told = json.loads((folder / "tokenizer.json").read_text())
    alone = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*CUTS[name](), alone]}
    for stage in told["pre_tokenizer"]["pretokenizers"]:
        if stage["type"] == "Split":
            stage.setdefault("invert", False)
    (folder / "tokenizer.json").write_text(json.dumps(told))
