"""Tokenizers of the same text: byte-level BPE of some size, and pieces as SentencePiece's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models import tiny_text

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it rests.",
    "It was a dark and stormy night; the rain fell in torrents.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語も少し。",
] * 3


def save_tokenizer(folder: Path, kind: str, size: int) -> Path:
    """Write the files of a tokenizer trained on `CORPUS`: `bytes` or `pieces`, of `size` tokens."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<|user|>"] if kind == "bytes" else ["<s>", "</s>"]
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            limit_alphabet=60,
            special_tokens=[f"<0x{n:02X}>" for n in range(256)],
            show_progress=False,
        )
    made.train_from_iterator(CORPUS, trainer)
    if kind == "pieces":  # pieces of bytes are no special tokens
        rules = json.loads(made.to_str())
        rules["added_tokens"] = []
        made = Tokenizer.from_str(json.dumps(rules))
    made.add_special_tokens([AddedToken(t, special=True) for t in special])
    tiny_text.save_files(folder, made)
    return folder
