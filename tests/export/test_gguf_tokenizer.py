"""Tokenizers as GGUF keys: llama.cpp's merging by scores gives the tokens of tokenizer.json."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import FormatError, MappingError
from megtool.export.gguf.tokenizer import tokenizer_keys
from tests.export import gguf_models

tokenizers = pytest.importorskip("tokenizers")

BLANK = "\u2581"


def _pieces() -> Any:
    """A BPE as Llama 2's: blanks are letters, bytes are tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    found = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    )
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    found.train_from_iterator([gguf_models.WORDS] * 3, trainer)
    return found


def _merged_by_scores(text: str, keys: dict[str, Any]) -> list[str]:
    """What llama.cpp does: of neighbours that make a token, those of the highest score first."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    by_text = {t: s for t, s in zip(tokens, scores, strict=True)}
    prefix = " " if keys["tokenizer.ggml.add_space_prefix"] else ""
    parts = list((prefix + text).replace(" ", BLANK))
    while True:
        pairs = [
            (by_text[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in by_text
        ]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_pieces_have_scores() -> None:
    source = _pieces()
    told = json.loads(source.to_str())
    for token in told["added_tokens"]:
        token["special"] = token["id"] < 3
    told["added_tokens"] = [t for t in told["added_tokens"] if t["id"] < 3]
    files = {"tokenizer.json": json.dumps(told).encode()}
    settings = {"bos_token": "<s>", "unk_token": {"content": "<unk>"}, "add_bos_token": True}
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    files["config.json"] = b'{"eos_token_id": [2, 1]}'
    keys = tokenizer_keys(files, 350)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_eos_token"] is False
    ids = [keys[f"tokenizer.ggml.{r}_token_id"] for r in ("bos", "eos", "unknown")]
    assert ids == [1, 2, 0]
    assert keys["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]
    assert "tokenizer.ggml.merges" not in keys
    for text in ("the cat sat", "bats saw 345 cats's life", "12"):
        want = source.encode(text, add_special_tokens=False).tokens
        assert _merged_by_scores(text, keys) == want


def test_splits_by_their_expressions(tmp_path: Path) -> None:
    gguf_models.byte_level(tmp_path, 300)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o"):
        expression = mapping.GGUF_PRE_TOKENIZER_SPLITS[name]
        cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
        told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, bytes_alone]}
        keys = tokenizer_keys({"tokenizer.json": json.dumps(told).encode()}, 320)
        assert keys["tokenizer.ggml.pre"] == name
    cut["pattern"] = {"Regex": "x"}
    files = {"tokenizer.json": json.dumps(told).encode()}
    with pytest.raises(MappingError, match="Split then ByteLevel") as error:
        tokenizer_keys(files, 320)
    assert "smollm, llama-bpe, qwen2" in (error.value.hint or "")
    assert tokenizer_keys(files, 320, split="mine")["tokenizer.ggml.pre"] == "mine"


def test_chat_templates_by_name(tmp_path: Path) -> None:
    gguf_models.byte_level(tmp_path, 300)
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    several = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": several}).encode()
    keys = tokenizer_keys(files, 320)
    assert keys["tokenizer.chat_template"] == "A"
    assert keys["tokenizer.chat_template.rag"] == "B"
    assert keys["tokenizer.chat_templates"] == ["rag"]


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (b"{", FormatError, "no JSON"),
        (b"[]", FormatError, "no JSON object"),
        (b'{"model": 3}', FormatError, "cannot be used"),
        (b'{"model": {"type": "Unigram", "vocab": {}}}', MappingError, "'Unigram'"),
        (b'{"model": {"type": "BPE", "vocab": {}}}', MappingError, "neither"),
    ],
)
def test_what_is_no_tokenizer(data: bytes, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tokenizer_keys({"tokenizer.json": data}, 10)
