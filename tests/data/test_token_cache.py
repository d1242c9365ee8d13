"""The cache of tokens: compared with its digest before it is used again, and rebuilt if damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from megtool.data.token_cache import Encoding, TokenCache, store_tokens
from megtool.data.tokenizer import Tokenizer
from tests.support.models import tiny_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f'{{"text": "the model reads {n}"}}\n' for n in range(20)))
    return path


def tokens_of(cache: TokenCache) -> list[int]:
    rows = [cache.tokens(n, 0, int(length)) for n, length in enumerate(cache.lengths)]
    return [int(i) for i in np.concatenate(rows)]


@pytest.mark.parametrize("damage", ["zeros", "a bit", "cut", "no lengths", "negative lengths"])
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, texts: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path / "tokenizer"))
    whole = store_tokens(texts, tokenizer, tmp_path / "cache", Encoding())
    expected = tokens_of(whole)
    again = store_tokens(texts, tokenizer, tmp_path / "cache", Encoding())
    assert (again.folder, tokens_of(again)) == (whole.folder, expected)
    path = whole.folder / ("lengths.npy" if "lengths" in damage else "tokens.bin")
    data = bytearray(path.read_bytes())
    if damage == "zeros":
        path.write_bytes(bytes(len(data)))
    elif damage == "a bit":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "negative lengths":
        np.save(path, -whole.lengths)
    else:
        path.write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING, "megtool"):
        rebuilt = store_tokens(texts, tokenizer, tmp_path / "cache", Encoding())
    assert tokens_of(rebuilt) == expected
    assert "tokenized again" in caplog.text
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [rebuilt.folder.name]
