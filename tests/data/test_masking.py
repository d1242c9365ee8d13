"""Masked tokens: as many as asked for, never special ones, and the same for the same row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megtool.data.masking import Masking
from megtool.data.packing import IGNORED
from megtool.data.tokenizer import Tokenizer
from megtool.errors import UsageError
from tests.support.errors import raises
from tests.support.models import tiny_text

MASK, VOCABULARY = 99, 100
MASKING = Masking(mask_id=MASK, vocab_size=VOCABULARY, special_ids=(0, 1))
TOKENS = np.random.default_rng(0).integers(0, 90, 20_000)


def test_a_share_of_the_tokens_is_to_be_predicted() -> None:
    inputs, labels = MASKING.masked(TOKENS, 0)
    chosen = labels != IGNORED
    assert (labels[chosen] == TOKENS[chosen]).all()
    assert (inputs[~chosen] == TOKENS[~chosen]).all()
    assert not np.isin(labels, (0, 1)).any()
    usual = ~np.isin(TOKENS, (0, 1))
    assert chosen.sum() / usual.sum() == pytest.approx(0.15, abs=0.01)
    fates = Counter(
        np.where(inputs == MASK, "masked", np.where(inputs == TOKENS, "same", "other"))[chosen]
    )
    for fate, share in (("masked", 0.8), ("other", 0.1), ("same", 0.1)):
        assert fates[fate] / chosen.sum() == pytest.approx(share, abs=0.02)
    assert inputs.max() < VOCABULARY


def test_row_and_seed_say_which() -> None:
    first, again = MASKING.masked(TOKENS, 7), MASKING.masked(TOKENS, 7)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    other = Masking(mask_id=MASK, vocab_size=VOCABULARY, seed=5)
    for inputs, _ in (MASKING.masked(TOKENS, 8), other.masked(TOKENS, 7)):
        assert (inputs != first[0]).any()
    _, labels = Masking(mask_id=MASK, vocab_size=VOCABULARY, share=1.0).masked(TOKENS, 0)
    assert (labels == TOKENS).all()


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_is_a_part(share: float) -> None:
    with raises(UsageError, f"a share of {share}", hint="0 to 1"):
        Masking(mask_id=MASK, vocab_size=VOCABULARY, share=share)


def test_the_mask_token_is_the_tokenizers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny_text.save_tokenizer(tmp_path / "with", has_mask=True)
    tiny_text.save_tokenizer(tmp_path / "without")
    tokenizer = Tokenizer.from_folder(tmp_path / "with")
    found = Masking.of(tokenizer, 262, share=0.3, seed=9)
    assert (found.mask_id, found.share, found.seed) == (258, 0.3, 9)
    assert {256, 257, 258} <= set(found.special_ids)
    for lacking in (None, Tokenizer.from_folder(tmp_path / "without")):
        with raises(UsageError, "no tokenizer with a mask token", hint="--tokenizer FOLDER"):
            Masking.of(lacking, 262)
    with pytest.raises(UsageError, match="mask token"):
        Masking.of(tokenizer, 258)  # the model has no such token
