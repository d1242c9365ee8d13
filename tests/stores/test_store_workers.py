"""Several workers write to a store what one writes to a disk, to the byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megtool import clean, reshard
from megtool.errors import DestinationError, FormatError, MegtoolError, UsageError
from megtool.plan import work_units
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.runs.worker_runs import UNIT_BYTES
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore

TARGETS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "40KB"},
    "one.safetensors": {"to": "safetensors"},
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "megatron": {"to": "megatron", "tp": 4},
    "dcp": {"to": "dcp"},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2},
    "zarr": {"to": "zarr"},
    "read back": {"to": "torch_dist", "tp": 4, "verify": True},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "source", parts=2)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    monkeypatch.setattr(part_layout, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    monkeypatch.setattr(work_units, "UNIT_BYTES", UNIT_BYTES)
    store = fresh()
    yield store
    store_index().forget(StorePath(URL))


def fresh() -> CountedStore:
    store = CountedStore()
    register_store(store)
    store_index().forget(StorePath(URL))
    return store


def at(store: CountedStore, name: str) -> dict[str, bytes]:
    objects = store.objects()
    return {"": objects[name]} if name in objects else store.objects(name)


def left_over(store: CountedStore) -> list[str]:
    keys = [k for k in store.objects() if ".megtool/" in k and not k.endswith("/published")]
    return keys + ["upload"] * store.num_uploads


@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_workers_writes_the_same_objects(
    tmp_path: Path, source: Path, store: CountedStore, target: str
) -> None:
    options = TARGETS[target] | {"threads": 1}
    reshard(source, tmp_path / target, **options)
    expected = contents(tmp_path / target)
    for count in (2, 3, 8):
        name = f"{count}/{target}"
        order = random.Random(count).sample(range(count), count)
        reports = [
            reshard(source, f"{URL}/{name}", worker=f"{n}/{count}", **options) for n in order
        ]
        states = [r.worker.state for r in reports]
        assert states == ["waiting"] * (count - 1) + ["published"], count
        assert at(store, name) == expected, count
        assert left_over(store) == [], count
        late = reshard(source, f"{URL}/{name}", worker=f"0/{count}", **options)
        assert late.worker.state == "complete"


@pytest.mark.parametrize("target", ["hf", "torch_dist", "tp 2", "dcp", "zarr"])
def test_parts_end_where_shares_do(source: Path, store: CountedStore, target: str) -> None:
    options = TARGETS.get(target, {"to": "megatron", "tp": 2}) | {"threads": 1}
    for count in (2, 3):
        for n in range(count - 1):
            reshard(source, f"{URL}/{count}", worker=f"{n}/{count}", **options)
        assert [key for key in store.objects() if "/fragments/" in key] == []


def test_parts_end_where_rows_of_blocks_do(
    tmp_path: Path, store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of GGUF's blocks are units, however long they are."""
    gguf = pytest.importorskip("gguf")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(tmp_path / "source.gguf"), "unheard-of")
    values = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    for name in ("a", "b"):
        writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    for count in (3, 4):
        for n in range(count - 1):
            run = {"worker": f"{n}/{count}", "to": "dcp", "threads": 1}
            reshard(tmp_path / "source.gguf", f"{URL}/{count}", **run)
    assert [key for key in store.objects() if "/fragments/" in key] == []


def test_workers_write_tensors_without_elements(tmp_path: Path, store: CountedStore) -> None:
    save_file({"a": np.zeros((0, 4), np.float32)}, tmp_path / "source.safetensors")
    for target in (f"{URL}/out", str(tmp_path / "out")):
        states = [
            reshard(tmp_path / "source.safetensors", target, to="hf", worker=f"{n}/2").worker.state
            for n in range(2)
        ]
        assert states == ["waiting", "published"]
    assert at(store, "out") == contents(tmp_path / "out")


def test_workers_that_are_killed_go_on(tmp_path: Path, source: Path, store: CountedStore) -> None:
    options = {"to": "torch_dist", "tp": 2, "threads": 1}
    reshard(source, tmp_path / "out", **options)
    expected = contents(tmp_path / "out")
    for n in range(3):
        reshard(source, f"{URL}/whole", worker=f"{n}/3", **options)
    total = store.num_calls
    for number in range(1, total, 29):
        store = fresh()
        store.dies_at = number
        for n in range(3):
            with suppress(MegtoolError):
                reshard(source, f"{URL}/out", worker=f"{n}/3", **options)
        store.revive()
        states = [
            reshard(source, f"{URL}/out", worker=f"{n}/3", **options).worker.state
            for n in (2, 0, 1)
        ]
        assert states[-1] in ("published", "complete"), number
        assert at(store, "out") == expected, number
        assert left_over(store) == [], number
        assert [place for place, count in store.uploads.items() if count > 1] == [], number


def test_a_part_that_is_lost_is_noticed(source: Path, store: CountedStore) -> None:
    options = {"to": "dcp", "threads": 1}
    reshard(source, f"{URL}/out", worker="0/2", **options)
    (upload,) = store.list_uploads("out")
    store.abort_upload(upload.key, upload.upload_id)
    with raises(FormatError, "the store does not have it any more", "megtool clean"):
        reshard(source, f"{URL}/out", worker="1/2", **options)
    assert not store.objects("out")
    assert clean(f"{URL}/out", yes=True).removed
    assert left_over(store) == []


def test_overwriting_repairs_what_was_damaged_since(source: Path, store: CountedStore) -> None:
    options: dict[str, Any] = {"to": "torch_dist", "tp": 2, "overwrite": True}
    for n in range(2):
        reshard(source, f"{URL}/out", worker=f"{n}/2", **options)
    expected = at(store, "out")
    late = reshard(source, f"{URL}/out", worker="0/2", **options)
    assert late.worker.state == "complete"
    store.delete(["out/release/__0_0.distcp"])
    store_index().forget(StorePath(URL))
    states = [
        reshard(source, f"{URL}/out", worker=f"{n}/2", **options).worker.state for n in range(2)
    ]
    assert states == ["waiting", "published"]
    assert at(store, "out") == expected


def test_another_plan_does_not_join(source: Path, store: CountedStore) -> None:
    reshard(source, f"{URL}/out", worker="0/2", to="dcp")
    before = store.objects()
    with raises(DestinationError, "of 2 workers, not 3", "megtool clean"):
        reshard(source, f"{URL}/out", worker="0/3", to="dcp")
    with raises(DestinationError, "another source or other options", "megtool clean"):
        reshard(source, f"{URL}/out", worker="1/2", to="hf")
    with raises(DestinationError, "2 workers have begun", "--worker 0/2"):
        reshard(source, f"{URL}/out", to="dcp")
    assert store.objects() == before


def test_databases_are_written_by_one_process(source: Path, store: CountedStore) -> None:
    with raises(UsageError, "written by one process", "--worker 0/1"):
        reshard(source, f"{URL}/out", worker="0/2", to="zarr", compress="zstd")
    assert store.objects() == {}
