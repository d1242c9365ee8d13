"""Tokenizers as GGUF keys: llama.cpp's merging by scores gives the tokens of tokenizer.json."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import FormatError, MappingError
from megtool.export.gguf.tokenizer import build_tokenizer_keys
from tests.support.errors import raises
from tests.support.models import byte_level

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
    found.train_from_iterator([byte_level.WORDS] * 3, trainer)
    return found


def _merged_by_scores(text: str, keys: dict[str, Any]) -> list[str]:
    """What llama.cpp does: of neighbors that make a token, those of the highest score first."""
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
    keys = build_tokenizer_keys(files, 350)
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
    byte_level.save(tmp_path, 300)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o"):
        expression = mapping.GGUF_PRE_TOKENIZER_SPLITS[name]
        cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
        told["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, bytes_alone]}
        keys = build_tokenizer_keys({"tokenizer.json": json.dumps(told).encode()}, 320)
        assert keys["tokenizer.ggml.pre"] == name
    cut["pattern"] = {"Regex": "x"}
    files = {"tokenizer.json": json.dumps(told).encode()}
    with raises(MappingError, match="Split then ByteLevel", hint="smollm, llama-bpe, qwen2"):
        build_tokenizer_keys(files, 320)
    assert build_tokenizer_keys(files, 320, pre_tokenizer="mine")["tokenizer.ggml.pre"] == "mine"


@pytest.mark.parametrize("name", byte_level.CUTS)
def test_splits_by_several_expressions(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    byte_level.save(tmp_path, 300)
    byte_level.cut_as(tmp_path, name)
    told = (tmp_path / "tokenizer.json").read_bytes()
    assert build_tokenizer_keys({"tokenizer.json": told}, 320)["tokenizer.ggml.pre"] == name
    removed = told.replace(b'"Isolated"', b'"Removed"', 1)
    with pytest.raises(MappingError, match="cuts text in a way"):
        build_tokenizer_keys({"tokenizer.json": removed}, 320)


def _byte_level(folder: Path) -> dict[str, Any]:
    byte_level.save(folder, 300)
    told: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return told


def _keys(told: dict[str, Any]) -> dict[str, Any]:
    return build_tokenizer_keys({"tokenizer.json": json.dumps(told).encode()}, 350)


@pytest.mark.parametrize(
    ("part", "value", "match"),
    [
        ("normalizer", {"type": "Lowercase"}, "normalizer Lowercase"),
        ("normalizer", {"type": "NFKC"}, "normalizer NFKC"),
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
            "normalizer Lowercase",
        ),
        ("end_of_word_suffix", "</w>", "end_of_word_suffix '</w>'"),
        ("continuing_subword_prefix", "##", "continuing_subword_prefix '##'"),
    ],
)
def test_what_llama_cpp_does_not_do(tmp_path: Path, part: str, value: Any, match: str) -> None:
    told = _byte_level(tmp_path)
    _keys(told | {"normalizer": {"type": "NFC"}})
    (told if part == "normalizer" else told["model"])[part] = value
    with raises(MappingError, match=match, hint="--to hf"):
        _keys(told)


@pytest.mark.parametrize("split", [None, "llama-bpe"])
def test_whole_words_before_merges(tmp_path: Path, split: str | None) -> None:
    """llama.cpp looks words up first by the name of the split; it is the same where merging gives
    every token, and the tokens differ where it does not."""
    told = _byte_level(tmp_path)
    files = {"tokenizer.json": b""}

    def keys() -> Any:
        files["tokenizer.json"] = json.dumps(told).encode()
        return build_tokenizer_keys(files, 350, pre_tokenizer=split)

    for ignores in (False, True):
        told["model"]["ignore_merges"] = ignores
        assert keys()["tokenizer.ggml.pre"] == (split or "gpt-2")
    told["model"]["vocab"]["zzzz"] = 340
    told["model"]["ignore_merges"] = split is not None
    keys()
    told["model"]["ignore_merges"] = split is None
    from tokenizers import Tokenizer

    found = {
        i: Tokenizer.from_str(json.dumps(told | {"model": told["model"] | {"ignore_merges": i}}))
        .encode("zzzz")
        .ids
        for i in (False, True)
    }
    assert found[False] != found[True] == [340]
    with pytest.raises(MappingError, match="does not give the token 'zzzz'"):
        keys()


@pytest.mark.parametrize(
    "stage", [{"type": "NFKC"}, {"type": "Prepend", "prepend": "x"}, {"type": "Lowercase"}]
)
def test_stages_of_pieces(stage: dict[str, Any]) -> None:
    told = json.loads(_pieces().to_str())
    _keys(told)
    told["normalizer"]["normalizers"].append(stage)
    with pytest.raises(MappingError, match=f"the stage {stage['type']}"):
        _keys(told)


def test_chat_templates_by_name(tmp_path: Path) -> None:
    byte_level.save(tmp_path, 300)
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    several = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": several}).encode()
    keys = build_tokenizer_keys(files, 320)
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
        build_tokenizer_keys({"tokenizer.json": data}, 10)
