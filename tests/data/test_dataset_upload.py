"""A data set that is tokenized into a store: the bytes of a local one, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megtool import tokenize
from megtool.data.indexed import IndexedDataset
from megtool.errors import DestinationError, StorageError
from megtool.storage.location.path import location
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    tiny_tokenizer.save(folder)
    for name, words in (("a", "the model reads a text "), ("b", "every word again ")):
        lines = [json.dumps({"text": words * (n % 7 + 1)}) for n in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    monkeypatch.setattr(part_layout, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    store = CountedStore()
    register_store(store)
    store_index().forget(location(URL))
    yield store
    store_index().forget(location(URL))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def found(store: CountedStore) -> dict[str, bytes]:
    """The data set; what the questions to a store have left is not of it."""
    return {k: data for k, data in store.objects("data").items() if ".megtool/" not in k}


def test_it_is_that_of_a_disk(texts: Path, tmp_path: Path, store: CountedStore) -> None:
    local = tokenize(texts / "a.jsonl", tmp_path / "v1.0.bin", tokenizer=texts)
    there = tokenize(texts / "a.jsonl", f"{URL}/data/v1.0.bin", tokenizer=texts)
    assert there.written_bytes == local.written_bytes
    assert there.destination == f"{URL}/data/v1.0"
    assert store.objects("data") == files(tmp_path)
    assert store.num_uploads == 0
    assert store.calls["upload_part"] > 2
    read = IndexedDataset(location(f"{URL}/data/v1.0"))
    assert len(read) == local.documents


def test_it_replaces_none_that_it_may_not(texts: Path, tmp_path: Path, store: CountedStore) -> None:
    tokenize(texts / "a.jsonl", f"{URL}/data/v1", tokenizer=texts)
    first = store.objects("data")
    with raises(DestinationError, "already exists", "--overwrite", file=f"{URL}/data/v1.bin"):
        tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts)
    assert store.objects("data") == first
    tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts, overwrite=True)
    tokenize(texts / "b.jsonl", tmp_path / "v1", tokenizer=texts)
    assert store.objects("data") == files(tmp_path)


def test_a_store_that_is_only_read_is_refused_at_once(texts: Path) -> None:
    for dry_run in (True, False):
        with raises(DestinationError, "only read", hint="s3://"):
            tokenize(texts / "a.jsonl", "https://host/data/v1", tokenizer=texts, dry_run=dry_run)


def test_what_could_not_be_uploaded_stays(
    texts: Path, tmp_path: Path, store: CountedStore, caplog: pytest.LogCaptureFixture
) -> None:
    tokenize(texts / "b.jsonl", tmp_path / "v1", tokenizer=texts)
    tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts)
    again = CountedStore()
    register_store(again)
    store_index().forget(location(URL))
    again.dies_at = store.num_calls - 1
    with pytest.raises(StorageError):
        tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts)
    (told,) = [r for r in caplog.records if "complete in" in r.message]
    kept = Path(told.args[0])  # type: ignore[index,arg-type]
    assert files(kept) == files(tmp_path)
    shutil.rmtree(kept)


def test_at_no_call_is_it_of_two_runs(texts: Path, store: CountedStore) -> None:
    tokenize(texts / "a.jsonl", f"{URL}/data/v1", tokenizer=texts)
    first = store.objects("data")
    begin = store.num_calls
    tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts, overwrite=True)
    second, total = store.objects("data"), store.num_calls - begin
    assert total > 6
    for number in range(1, total + 1):
        again = CountedStore()
        register_store(again)
        store_index().forget(location(URL))
        for key, data in first.items():
            again.put(f"data/{key}", data)
        again.dies_at = again.num_calls + number
        with pytest.raises(StorageError):
            tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts, overwrite=True)
        again.revive()
        left = found(again)
        assert "v1.idx" not in left or left in (first, second), number
        tokenize(texts / "b.jsonl", f"{URL}/data/v1", tokenizer=texts, overwrite=True)
        assert found(again) == second, number
