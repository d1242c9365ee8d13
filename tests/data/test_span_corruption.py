"""Spans left out of texts: as many as asked for, each with its sentinel; rows of fixed sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.convert.families.detection import family
from megtool.data.open_dataset import RowForm, open_dataset
from megtool.data.packing import IGNORED
from megtool.data.source_target import SourceTarget, SourceTargetDataset
from megtool.data.span_corruption import SpanCorruption
from megtool.data.token_cache import Documents
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, UsageError
from tests.support.errors import raises
from tests.support.models import tiny_t5

SENTINELS = tuple(range(1000, 1100))
SPANS = SpanCorruption(sentinel_ids=SENTINELS)
CONFIG = family("t5").read_config(tiny_t5.SIZES)


def restore(source: list[int], target: list[int]) -> list[int]:
    """The text, with every sentinel replaced by what follows it in the target."""
    parts: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            parts[token] = []
        else:
            parts[next(reversed(parts))].append(token)
    return [t for token in source for t in parts.get(token, [token])]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20, 100, 568])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_the_target_has_what_the_source_lacks(length: int, share: float) -> None:
    spans = SpanCorruption(sentinel_ids=SENTINELS * 4, share=share)
    tokens = np.arange(length)
    source, target = (x.tolist() for x in spans.split(tokens, 3))
    if len(set(target)) == len(target):
        assert restore(source, target) == tokens.tolist()
    assert (len(source), len(target)) == spans.sizes(length)
    left_out, number = spans.counts(length)
    assert sum(t in SENTINELS for t in source) == number
    assert left_out == min(max(round(length * share), 1), max(length - 1, 1))


def test_sizes_are_those_of_t5() -> None:
    """512 tokens of source with its end are made of 568, and 114 of target, as T5's papers have."""
    length = SPANS.text_length(511)
    assert length == 568
    assert SPANS.sizes(length)[1] + 1 == 114
    assert SPANS.counts(length) == (85, 28)


def test_row_and_seed_say_which() -> None:
    tokens = np.arange(300)
    first = SPANS.split(tokens, 7)
    assert all((a == b).all() for a, b in zip(first, SPANS.split(tokens, 7), strict=True))
    other = SpanCorruption(sentinel_ids=SENTINELS, seed=5)
    for source, _ in (SPANS.split(tokens, 8), other.split(tokens, 7)):
        assert (source != first[0]).any()


def test_what_cannot_be_is_refused() -> None:
    for share in (0.0, 1.0):
        with raises(UsageError, f"a share of {share}"):
            SpanCorruption(sentinel_ids=(), share=share)
    with raises(UsageError, "spans of 0.5 tokens"):
        SpanCorruption(sentinel_ids=(), mean_span=0.5)
    with raises(UsageError, "the tokenizer has 2 sentinels", hint="--seq-length"):
        SpanCorruption(sentinel_ids=(1, 2)).text_length(100)
    with raises(UsageError, "no room"):
        SPANS.text_length(0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    pytest.importorskip("transformers")
    tiny_t5.save_tokenizer(tmp_path / "tokenizer")
    return Tokenizer.from_folder(tmp_path / "tokenizer")


def opened(
    file: Path, tokenizer: Tokenizer, length: int, target: int | None = None
) -> SourceTargetDataset:
    form = SourceTarget.of(tokenizer, CONFIG)
    options = RowForm(length=length, seed=None, targets=form, target_length=target)
    found = open_dataset([file], tokenizer, options, cache=None, vocab_size=tiny_t5.VOCABULARY)
    assert isinstance(found, SourceTargetDataset)
    return found


def test_rows_of_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert len(tokenizer.sentinel_ids) == tiny_t5.NUM_SENTINELS
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "abc " * 30}) + "\n" for _ in range(4)))
    feed = opened(file, tokenizer, 40)
    rows, again = feed.rows(0, len(feed)), feed.rows(len(feed), len(feed))
    assert rows.sources_BE is not None
    assert rows.source_valid_BE is not None
    assert rows.sources_BE.shape == (len(feed), 40)
    assert rows.tokens_BS.shape == rows.labels_BS.shape == (len(feed), feed.target_length)
    assert (rows.tokens_BS[:, 0] == tiny_t5.PAD).all()
    assert (rows.sources_BE != again.sources_BE).any(), "the next epoch has other spans"
    for row in range(len(feed)):
        labels = rows.labels_BS[row][rows.labels_BS[row] != IGNORED]
        assert labels[-1] == tiny_t5.END
        assert (rows.tokens_BS[row, 1 : len(labels)] == labels[:-1]).all()
        source = rows.sources_BE[row][rows.source_valid_BE[row]]
        assert source[-1] == tiny_t5.END
        assert source[:-1].max() == labels[:-1].max()
    assert feed.counts.rows == len(feed)
    assert abs(feed.counts.labels - rows.num_labels) <= 2
    with raises(UsageError, "have targets of", hint="--decoder-seq-length"):
        opened(file, tokenizer, 40, 3)
    train, evaluation = feed.divided(0.3)
    assert len(train) + len(evaluation) == len(feed)
    assert evaluation.rows(0, 1).sources_BE is not None


class _Counted:
    """Documents that count how often tokens were read."""

    def __init__(self, documents: Documents) -> None:
        self.documents, self.num_reads = documents, 0
        self.is_partly_learned, self.lengths = documents.is_partly_learned, documents.lengths
        self.fingerprint = documents.fingerprint

    def tokens(self, document: int, begin: int, end: int) -> Any:
        self.num_reads += 1
        return self.documents.tokens(document, begin, end)

    def learned(self, document: int, begin: int, end: int) -> Any:
        return self.documents.learned(document, begin, end)


def test_rows_of_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "hello", "completion": "yes"}\n{"prompt": "a", "completion": "b"}')
    feed = opened(file, tokenizer, 8, 5)
    rows = feed.rows(0, 2)
    assert rows.sources_BE is not None
    assert rows.source_valid_BE is not None
    assert tokenizer.decode(rows.sources_BE[0][rows.source_valid_BE[0]].tolist()) == "hello"
    assert rows.source_valid_BE.sum(1).tolist() == [6, 2]
    labels = [row[row != IGNORED].tolist() for row in rows.labels_BS]
    assert [tokenizer.decode(x[:-1]) for x in labels] == ["yes", "b"]
    documents = _Counted(feed._documents)
    again = SourceTargetDataset(documents, 8, feed.form)
    assert again.counts.labels == feed.counts.labels == 6
    assert documents.num_reads == 2, "each pair is read once, for its lengths and for the counts"
    with raises(FormatError, "document 1 has 6 tokens of source", hint="--overflow truncate"):
        opened(file, tokenizer, 5, 5)
    chats = tmp_path / "chat.jsonl"
    chats.write_text('{"prompt": "", "completion": "yes"}')
    with raises(FormatError, "no source with a target"):
        opened(chats, tokenizer, 8, 5)
