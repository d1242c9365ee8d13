"""The feed: every label once a pass, the same sample for a number, shares, and one error each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.data.blend import Blend
from megtool.data.dataset import BlendedDataset, TokenDataset
from megtool.data.indexed import IndexedWriter
from megtool.data.open_dataset import RowForm, open_dataset
from megtool.data.packing import IGNORED, PackedRows
from megtool.data.sample_index import Mode, Overflow
from megtool.data.token_cache import Encoding, TokenCache, store_tokens
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, StorageError, UsageError
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer

MODES: tuple[Mode, ...] = ("packed", "whole", "padded")


class InMemory:
    """Documents whose tokens are all different, some of them learned in part."""

    def __init__(self, lengths: list[int], *, partly: bool = False) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.fingerprint, self.is_partly_learned = repr(lengths), partly
        self._first = np.concatenate([[0], np.cumsum(self.lengths)])

    def tokens(self, document: int, begin: int, end: int) -> np.ndarray:
        return np.arange(self._first[document] + begin, self._first[document] + end)

    def learned(self, document: int, begin: int, end: int) -> np.ndarray | None:
        if not self.is_partly_learned or document % 3 == 0:
            return None
        return (self.tokens(document, begin, end) % 2 == 0) & (document % 3 == 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny_tokenizer.save(tmp_path_factory.mktemp("tokenizer")))


def learned_pairs(rows: PackedRows) -> Counter[tuple[int, int]]:
    counted = rows.labels_BS != IGNORED
    pairs = zip(rows.tokens_BS[counted].tolist(), rows.labels_BS[counted].tolist(), strict=True)
    return Counter(pairs)


@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=30),
    row=st.integers(1, 12),
    mode=st.sampled_from(MODES),
    partly=st.booleans(),
)
def test_a_pass_has_every_label_once(
    lengths: list[int], row: int, mode: Mode, partly: bool
) -> None:
    documents = InMemory(lengths, partly=partly)
    expected: Counter[tuple[int, int]] = Counter()
    for number, size in enumerate(lengths):
        ids = documents.tokens(number, 0, size)
        mask = documents.learned(number, 1, size)
        for at in range(size - 1):
            if mask is None or mask[at]:
                expected[int(ids[at]), int(ids[at + 1])] += 1
    if not expected:
        with pytest.raises(FormatError, match="nothing to train on"):
            TokenDataset(documents, row, mode=mode)
        return
    feed = TokenDataset(documents, row, mode=mode)
    for epoch in range(2):
        rows = feed.rows(epoch * len(feed), len(feed))
        assert learned_pairs(rows) == expected
        # Within a document, positions follow each other and tokens do.
        same = (rows.documents_BS[:, 1:] == rows.documents_BS[:, :-1]) & rows.valid_BS[:, 1:]
        steps = np.diff(rows.tokens_BS, axis=1)[same], np.diff(rows.positions_BS, axis=1)[same]
        assert all((s == 1).all() for s in steps)
    counts = feed.counts
    assert counts.labels == sum(expected.values())
    assert counts.filled == pytest.approx(rows.valid_BS.mean())
    if mode == "packed" and not partly:
        assert len(feed) == -(-sum(max(n - 1, 0) for n in lengths) // row)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=3, max_size=40),
    first=st.integers(0, 200),
    count=st.integers(1, 7),
)
def test_a_sample_is_the_same_whoever_asks(lengths: list[int], first: int, count: int) -> None:
    whole = TokenDataset(InMemory(lengths), 8).rows(0, first + count)
    again = TokenDataset(InMemory(lengths), 8)
    part = again.rows(first, count)
    assert (part.tokens_BS == whole.tokens_BS[first:]).all()
    one = again.rows(first + count - 1, 1)
    assert (one.labels_BS == whole.labels_BS[-1:]).all()


def test_order_follows_the_seed_and_differs_between_passes() -> None:
    feed, other = (TokenDataset(InMemory([50] * 40), 16, seed=seed) for seed in (1, 2))
    passes = [feed.rows(i * len(feed), len(feed)).tokens_BS for i in range(2)]
    assert (passes[0] != passes[1]).any()
    assert (passes[0] != other.rows(0, len(other)).tokens_BS).any()
    assert feed.fingerprint != other.fingerprint
    plain = TokenDataset(InMemory([50] * 3), 49, seed=None).rows(0, 3)
    assert plain.tokens_BS[:, 0].tolist() == [0, 50, 100]


@pytest.mark.parametrize("mode", ["whole", "padded"])
def test_whole_documents_are_not_cut(mode: Mode) -> None:
    feed = TokenDataset(InMemory([5, 9, 3, 6, 2, 8]), 10, mode=mode)
    for row in feed.rows(0, len(feed)).documents_BS:
        kept = row[row >= 0]
        assert len(np.unique(kept)) == (1 if mode == "padded" else np.sum(np.diff(kept) != 0) + 1)
    assert feed.counts.split == 0
    assert len(feed) == (6 if mode == "padded" else len(feed))


@pytest.mark.parametrize(
    ("overflow", "labels", "truncated", "split"), [("split", 40, 0, 2), ("truncate", 23, 2, 0)]
)
def test_long_documents_are_split_or_cut_off(
    overflow: Overflow, labels: int, truncated: int, split: int
) -> None:
    counts = TokenDataset(InMemory([21, 4, 18]), 10, mode="whole", overflow=overflow).counts
    assert (counts.labels, counts.truncated, counts.split) == (labels, truncated, split)


def test_what_must_not_be_too_long_is_packed_all_the_same() -> None:
    documents = InMemory([5, 9, 7, 4])
    strict, plain = (TokenDataset(documents, 10, overflow=o) for o in ("error", "split"))
    assert len(strict) == len(plain) == 3
    assert strict.counts.split == plain.counts.split == 0
    assert TokenDataset(InMemory([25, 4]), 10).counts.split == 1


def test_a_long_document_may_be_an_error() -> None:
    with raises(FormatError, "2", "12 tokens", "10"):
        TokenDataset(InMemory([4, 12]), 10, overflow="error")


def test_held_out_rows_are_never_learned() -> None:
    feed = TokenDataset(InMemory([30] * 20), 16)
    kept, held = feed.divided(0.2)
    learned, evaluated = (learned_pairs(f.rows(0, len(f))) for f in (kept, held))
    assert not learned.keys() & evaluated.keys()
    assert learned + evaluated == learned_pairs(feed.rows(0, len(feed)))
    assert len(held) == round(0.2 * len(feed))
    with pytest.raises(UsageError, match="to evaluate on"):
        TokenDataset(InMemory([5]), 16).divided(0.5)


@given(
    shares=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    samples=st.lists(st.integers(0, 17_000), min_size=1, max_size=5),
)
@settings(max_examples=20)
def test_a_blend_keeps_its_shares(shares: list[float], samples: list[int]) -> None:
    blend = Blend(shares)
    for sample in samples:
        which, number = blend.place(sample)
        assert number <= blend.shares[which] * (sample + 1) + 1
        after, again = blend.place(sample + 1)
        assert (again == number + 1) if after == which else True


@pytest.mark.peers
def test_a_blend_is_that_of_megatron() -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError)
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    which, number = np.zeros(20_000, np.int16), np.zeros(20_000, np.int64)
    helpers.build_blending_indices(which, number, shares, 4, 20_000, False)
    blend = Blend(shares.tolist())
    for sample in [*range(200), 16_383, 16_384, 19_999]:
        assert blend.place(sample) == (which[sample], number[sample])


def test_blended_feeds_give_each_its_samples() -> None:
    feeds = [TokenDataset(InMemory([9] * 8), 8), TokenDataset(InMemory([9] * 4), 8)]
    blended = BlendedDataset(feeds, [0.25, 0.75])
    rows = blended.rows(0, 12)
    first = learned_pairs(feeds[0].rows(0, 3)) + learned_pairs(feeds[1].rows(0, 9))
    assert learned_pairs(rows) == first
    assert len(blended) == len(feeds[0]) + len(feeds[1])
    kept, held = blended.divided(0.25)
    assert len(kept) + len(held) == len(blended)
    every = learned_pairs(held.rows(0, len(held)))
    apart = [f.divided(0.25)[1] for f in feeds]
    assert every == sum((learned_pairs(f.rows(0, len(f))) for f in apart), Counter())
    assert learned_pairs(held.rows(len(held), len(held))) == every
    with pytest.raises(UsageError, match="2 data sets"):
        BlendedDataset(feeds, [1.0])


def test_chats_learn_answers_and_texts_everything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "the model"}, {"role": "assistant", "content": "a text"}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(3)))
    cache = tmp_path / "cache"
    feed = open_dataset([chats], tokenizer, RowForm(length=64), cache=cache, vocab_size=300)
    rows = feed.rows(0, 1)
    assert 0 < rows.num_labels < rows.valid_BS.sum()
    everything = Encoding(answers_only=False)
    both = open_dataset(
        [chats], tokenizer, RowForm(length=64), cache=cache, vocab_size=300, encoding=everything
    )
    assert both.rows(0, 1).num_labels == both.rows(0, 1).valid_BS.sum()
    assert both.fingerprint != feed.fingerprint


def test_of_a_prompt_in_messages_no_turn_is_learned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "the model"}
    old, new = ({"role": "assistant", "content": c} for c in ("a text", "reads"))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": [asked, old, asked], "completion": [new]}))
    rows = open_dataset([data], tokenizer, RowForm(length=64), cache=None, vocab_size=300).rows(
        0, 1
    )
    learned = tokenizer.decode(rows.labels_BS[rows.labels_BS != IGNORED].tolist())
    assert "reads" in learned
    assert "a text" not in learned
    data.write_text(json.dumps({"prompt": [asked, old, asked], "completion": "reads"}))
    with pytest.raises(FormatError, match="line 1: the prompt has no list of messages"):
        open_dataset([data], tokenizer, RowForm(length=64), cache=None, vocab_size=300)


def test_a_store_is_made_once_and_anew_when_its_source_changes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("the model reads a text " * 9)
    seen: list[int] = []
    one = store_tokens(text, tokenizer, cache, Encoding(), progress=lambda *_: seen.append(1))
    two = store_tokens(text, tokenizer, cache, Encoding(), progress=lambda *_: seen.append(1))
    assert len(seen) == 1
    assert one.fingerprint == two.fingerprint
    text.write_text("the model reads another text " * 9)
    assert store_tokens(text, tokenizer, cache, Encoding()).fingerprint != one.fingerprint
    assert not list(cache.glob("*.partial"))
    (one.folder / "tokens.bin").write_bytes(b"12")
    with pytest.raises(FormatError, match="token cache is incomplete"):
        TokenCache(one.folder)
    assert store_tokens(text, tokenizer, None, Encoding()).lengths.sum() > 9


def test_a_data_set_of_megatron_is_a_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype("<u2")) as writer:
        for size in (9, 17):
            writer.add(range(3, 3 + size))
            writer.end_document()
    for name in ("set", "set.bin", "set.idx"):
        feed = open_dataset(
            [tmp_path / name],
            tokenizer,
            RowForm(length=8, seed=None),
            cache=None,
            vocab_size=300,
        )
        assert feed.rows(0, 1).labels_BS[0].tolist() == list(range(4, 12))
    with pytest.raises(FormatError, match="token 19, and the model knows 0 to 18"):
        open_dataset([tmp_path / "set"], tokenizer, RowForm(length=8), cache=None, vocab_size=19)


def test_a_broken_line_is_named_and_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bad, cache = tmp_path / "bad.jsonl", tmp_path / "cache"
    bad.write_text('{"text": "the"}\n{"text": \n')
    with raises(FormatError, match="line 2", file=bad):
        open_dataset([bad], tokenizer, RowForm(length=8), cache=cache, vocab_size=300)
    assert not list(cache.iterdir())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(FormatError, match="nothing to train on"):
        open_dataset(
            [tmp_path / "empty.jsonl"], tokenizer, RowForm(length=8), cache=cache, vocab_size=300
        )
    file = tmp_path / "file"
    file.write_text("")
    good = tmp_path / "good.txt"
    good.write_text("the model")
    with pytest.raises(StorageError, match="cannot be cached"):
        open_dataset([good], tokenizer, RowForm(length=8), cache=file / "in", vocab_size=300)
