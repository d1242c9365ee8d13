"""Tokens of two tokenizers stand for the same bytes in every span."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool.data.token_alignment import TokenAligner, TokenBytes, TokenSpan
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError
from tests.support.errors import raises
from tests.support.models.tiny_vocabularies import CORPUS, save_tokenizer

TEXTS = [*CORPUS[:3], " leading space", "a", "naïve 🙂 emoji\n\nnew lines", "ﬁ ligature ½"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenBytes]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("vocabularies")
    kinds = {"small": ("bytes", 300), "large": ("bytes", 420), "pieces": ("pieces", 420)}
    return {
        name: TokenBytes(Tokenizer.from_folder(save_tokenizer(root / name, *kind)))
        for name, kind in kinds.items()
    }


@pytest.mark.parametrize("own", ["small", "large", "pieces"])
@pytest.mark.parametrize("other", ["small", "large", "pieces"])
def test_every_span_has_the_same_bytes(own: str, other: str, pieces: dict[str, TokenBytes]) -> None:
    a, b = pieces[own], pieces[other]
    for text in TEXTS:
        tokens = a.tokenizer.encode(text, add_special=False)
        whole = b"".join(a.of(t) or b"" for t in tokens)
        assert whole.removeprefix(b" " if a.marks_spaces else b"") == text.encode()
        found = TokenAligner(a, b).align(tokens)
        assert b.tokenizer.decode(found.tokens).lstrip() == text.lstrip()
        # SentencePiece's mark before a text may be a token by itself, which has no text.
        place = [
            int(side.marks_spaces and side.of(ids[0]) == b" ")
            for side, ids in ((a, tokens), (b, found.tokens))
        ]
        for span in found.spans:
            assert [span.own[0], span.other[0]] == place  # they follow each other
            place = [span.own[1], span.other[1]]
            data = [
                b"".join(side.of(t) or b"" for t in ids[slice(*at)])
                for side, ids, at in ((a, tokens, span.own), (b, found.tokens, span.other))
            ]
            assert data[0].lstrip() == data[1].lstrip()
            # None is larger than it has to be: no boundary within is common to both.
            inner = [
                {
                    len(b"".join(side.of(t) or b"" for t in ids[at[1] - n : at[1]]))
                    for n in range(1, at[1] - at[0])
                }
                for side, ids, at in ((a, tokens, span.own), (b, found.tokens, span.other))
            ]
            assert not inner[0] & inner[1]
        assert place == [len(tokens), len(found.tokens)]
        if own == other:
            assert all(s.own == s.other for s in found.spans)
            assert all(s.own[1] - s.own[0] == 1 for s in found.spans)


def test_tokens_that_are_no_text(pieces: dict[str, TokenBytes]) -> None:
    """The end of a text is the other's; `<|user|>`, which the other lacks, is left out."""
    a, b = pieces["large"], pieces["pieces"]
    user, end = a.tokenizer.token_id("<|user|>"), a.tokenizer.eos_id
    assert user is not None
    assert end is not None
    hello = a.tokenizer.encode("the rain", add_special=False)
    found = TokenAligner(a, b).align([user, *hello, end])
    theirs = b.tokenizer.encode("the rain", add_special=False)
    assert found.tokens == [*theirs, b.tokenizer.eos_id]
    n, m = len(hello), len(theirs)
    assert found.spans[-1] == TokenSpan((n + 1, n + 2), (m, m + 1))
    assert found.spans[-2].own[1] == n + 1
    twin = TokenAligner(a, pieces["small"]).align([user, *hello, end])
    assert twin.tokens[0] == pieces["small"].tokenizer.token_id("<|user|>")
    assert twin.spans[0] == TokenSpan((0, 1), (0, 1))


def test_a_text_cut_within_a_character(pieces: dict[str, TokenBytes]) -> None:
    a, b = pieces["small"], pieces["large"]
    tokens = a.tokenizer.encode("日本 the rain 日本", add_special=False)
    whole = TokenAligner(a, b).align(tokens)
    cut = TokenAligner(a, b).align(tokens[1:-1])
    assert b.tokenizer.decode(cut.tokens) == "本 the rain 日"
    assert cut.spans
    for span in cut.spans:
        data = [
            b"".join(side.of(t) or b"" for t in ids[slice(*at)])
            for side, ids, at in ((a, tokens[1:-1], span.own), (b, cut.tokens, span.other))
        ]
        assert data[0] == data[1]
    assert len(cut.spans) < len(whole.spans)


def test_tokens_that_both_have(pieces: dict[str, TokenBytes]) -> None:
    a, b = pieces["small"], pieces["pieces"]
    pairs = a.shared(b)
    assert [p for _, p in pairs] == sorted({p for _, p in pairs})
    names = [(a.special.get(x), b.special.get(y)) for x, y in pairs]
    assert {n for n in names if n[0]} == {("<s>", "<s>"), ("</s>", "</s>")}
    assert all(a.of(x) == b.of(y) for x, y in pairs)
    texts = {a.of(x) for x, _ in pairs}
    assert b"t" in texts
    assert any(text and len(text) > 1 for text in texts)


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    made = Fast(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with raises(MappingError, "neither a byte-level BPE"):
        TokenBytes(Tokenizer.from_folder(tmp_path))
