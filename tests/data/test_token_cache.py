"""The cache of tokens: compared with its digest before it is used again, and rebuilt if damaged."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megtool.data import check_record
from megtool.data.indexed import IndexedWriter
from megtool.data.token_cache import Encoding, IndexedStore, TokenCache, store_tokens
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError
from tests.support.errors import raises
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


@pytest.fixture
def checked(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Open the cache, which has been checked once; whether it was read whole."""
    monkeypatch.setattr(check_record, "_SETTLED_NS", 0)
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path / "tokenizer"))
    compared: list[Path] = []
    compare = TokenCache._compare_digest

    def watch(cache: TokenCache) -> None:
        compared.append(cache.folder)
        compare(cache)

    monkeypatch.setattr(TokenCache, "_compare_digest", watch)

    def open_again() -> bool:
        compared.clear()
        store_tokens(texts, tokenizer, tmp_path / "cache", Encoding())
        return bool(compared)

    assert not open_again()
    assert open_again()
    return open_again


def test_a_cache_is_read_whole_once(checked: Callable[[], bool]) -> None:
    assert not checked()
    assert not checked()


def test_a_changed_cache_is_read_whole_again(checked: Callable[[], bool], tmp_path: Path) -> None:
    (tokens,) = tmp_path.glob("cache/*/tokens.bin")
    before, data = tokens.stat(), bytearray(tokens.read_bytes())
    data[5] ^= 1
    tokens.write_bytes(data)
    os.utime(tokens, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    assert checked()
    assert bytes(tokens.read_bytes()) != bytes(data)


@pytest.mark.parametrize("record", ["[", "null", '{"version": 1}', "[" * 100_000])
def test_a_damaged_record_is_made_again(
    checked: Callable[[], bool], tmp_path: Path, record: str
) -> None:
    (path,) = tmp_path.glob("cache/*/check.json")
    path.write_text(record)
    assert checked()
    assert not checked()


def test_blocks_that_rot_are_found(checked: Callable[[], bool], tmp_path: Path) -> None:
    (path,) = tmp_path.glob("cache/*/check.json")
    (tokens,) = tmp_path.glob("cache/*/tokens.bin")
    data = bytearray(tokens.read_bytes())
    data[5] ^= 1
    tokens.write_bytes(data)
    record = json.loads(path.read_text())
    status = tokens.stat()
    record["states"][str(tokens)] = [
        status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    ]  # fmt: skip
    path.write_text(json.dumps(record))
    assert checked()
    assert bytes(tokens.read_bytes()) != bytes(data)


def test_a_file_that_has_just_changed_is_not_recorded(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_record, "_SETTLED_NS", 3600 * 10**9)
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path / "tokenizer"))
    for _ in range(2):
        store_tokens(texts, tokenizer, tmp_path / "cache", Encoding())
    assert not list(tmp_path.glob("cache/*/check.json"))


def test_indexed_data_are_read_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_record, "_SETTLED_NS", 0)
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add([1, 2, 3])
        writer.end_document()
    first = IndexedStore(tmp_path / "data", 10, cache=tmp_path / "cache")
    monkeypatch.setattr(IndexedStore, "_scan", lambda _: pytest.fail("it was read again"))
    again = IndexedStore(tmp_path / "data", 10, cache=tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    with raises(FormatError, "token 3", file=tmp_path / "data.bin"):
        IndexedStore(tmp_path / "data", 3, cache=tmp_path / "cache")
    monkeypatch.undo()
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add([1, 2, 2])
        writer.end_document()
    changed = IndexedStore(tmp_path / "data", 10, cache=tmp_path / "cache")
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize(("dtype", "ids"), [(np.int32, [1, -2]), (np.float32, [0.5, 2.0])])
def test_indexed_data_that_are_no_tokens_are_refused(
    tmp_path: Path, dtype: type[np.generic], ids: list[float]
) -> None:
    with IndexedWriter(tmp_path / "data", dtype) as writer:
        writer.add(np.asarray(ids, dtype))
        writer.end_document()
    with pytest.raises(FormatError, match="token"):
        IndexedStore(tmp_path / "data", 10)
