"""What other verbs write to a store is what they write to a disk, and their memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool import export, quantize, reshard
from megtool.errors import DestinationError
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_buffers, part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.stores.connect import register_store
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "source", parts=2, **SIZES)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    monkeypatch.setattr(part_layout, "PART_BYTES", 8 * PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    store = CountedStore()
    register_store(store)
    store_index().forget(StorePath(URL))
    yield store
    store_index().forget(StorePath(URL))


def check(store: CountedStore, name: str, folder: Path) -> None:
    assert store.objects(name) == contents(folder)
    assert [key for key in store.objects() if ".megtool/" in key] == []
    assert store.num_uploads == 0


@pytest.mark.parametrize(
    "options",
    [{"to": "hf", "max_shard_size": "100KB"}, {"to": "trtllm-legacy", "tp": 2}],
    ids=["hf", "trtllm-legacy"],
)
def test_exports(
    source: Path, tmp_path: Path, store: CountedStore, options: dict[str, Any]
) -> None:
    export(source, tmp_path / "out", **options)
    export(source, f"{URL}/out", **options)
    check(store, "out", tmp_path / "out")


@pytest.mark.parametrize("recipe", ["fp8_per_channel", "int4_weight_only"])
def test_quantized_checkpoints(
    source: Path, tmp_path: Path, store: CountedStore, recipe: str
) -> None:
    quantize(source, tmp_path / "out", recipe=recipe)
    quantize(source, f"{URL}/out", recipe=recipe)
    check(store, "out", tmp_path / "out")
    with raises(DestinationError, "already exists", "--overwrite"):
        quantize(source, f"{URL}/out", recipe=recipe)


def test_a_quantized_folder_is_exported_within_a_store(
    source: Path, tmp_path: Path, store: CountedStore
) -> None:
    quantize(source, f"{URL}/fp8", recipe="fp8_per_channel")
    quantize(source, tmp_path / "fp8", recipe="fp8_per_channel")
    export(tmp_path / "fp8", tmp_path / "out", to="compressed-tensors")
    export(f"{URL}/fp8", f"{URL}/out", to="compressed-tensors")
    check(store, "out", tmp_path / "out")


@pytest.mark.parametrize("threads", [1, 4])
def test_parts_beyond_the_budget_are_in_a_temporary_file(
    source: Path,
    tmp_path: Path,
    store: CountedStore,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    budget, made = 12 * PART_BYTES, list[PartBuffers]()
    monkeypatch.setattr(part_buffers, "BUDGET_BYTES", budget)
    begin = PartBuffers.__init__

    def remember(self: PartBuffers, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(PartBuffers, "__init__", remember)
    options = {"to": "torch_dist", "tp": 2, "threads": threads}
    reshard(source, tmp_path / "out", **options)
    reshard(source, f"{URL}/out", **options)
    check(store, "out", tmp_path / "out")
    (buffers,) = made
    assert 0 < buffers.peak_bytes <= budget
    assert buffers.spilled_bytes > 0
    assert buffers.num_bytes == 0
