"""Checkpoints written to a store in memory: the same bytes as local ones, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megtool import clean, reshard, verify
from megtool.errors import (
    DestinationError,
    FormatError,
    MegtoolError,
    SourceChangedError,
    StorageError,
)
from megtool.plan import work_units
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore

FORMATS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "hf": {"to": "hf", "max_shard_size": "30KB"},
    "dcp": {"to": "dcp"},
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2},
    "megatron": {"to": "megatron", "tp": 2},
    "zarr": {"to": "zarr"},
    "tensorstore": {"to": "tensorstore"},
    "compressed": {"to": "zarr", "compress": "zstd"},
    "one.safetensors": {"to": "safetensors"},
}
STREAMED = {name: FORMATS[name] for name in ("torch_dist", "hf", "one.safetensors")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "source")


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a local reshard writes, by format."""
    root, known = tmp_path_factory.mktemp("local"), dict[str, Any]()

    def written(name: str) -> Any:
        if name not in known:
            reshard(source, root / name, **FORMATS[name])
            known[name] = contents(root / name)
        return known[name]

    return written


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts and units in few bytes."""
    monkeypatch.setattr(part_layout, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)


@pytest.fixture
def store(small_parts: None) -> Iterator[CountedStore]:
    store = CountedStore()
    register_store(store)
    yield store
    store_index().forget(StorePath(URL))


def written(store: MemoryStore, name: str) -> dict[str, bytes]:
    """What is at a destination, as `contents` shows a folder or a file."""
    assert isinstance(store, CountedStore)
    objects = store.objects()
    if name in objects:
        return {"": objects[name]}
    return store.objects(name)


def left_over(store: CountedStore) -> list[str]:
    """Keys beside destinations, and uploads that nobody has ended."""
    return [k for k in store.objects() if ".megtool/" in k] + ["upload"] * store.num_uploads


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written_as_a_local_one(
    source: Path, store: CountedStore, local: Callable[[str], Any], name: str
) -> None:
    report = reshard(source, f"{URL}/run/{name}", **FORMATS[name])
    assert written(store, f"run/{name}") == local(name)
    assert report.warnings == ()
    assert left_over(store) == []


def test_parts_have_their_size_by_default(source: Path, local: Callable[[str], Any]) -> None:
    store = CountedStore(min_part_bytes=5 << 20)
    register_store(store)
    reshard(source, f"{URL}/run", **FORMATS["torch_dist"])
    assert written(store, "run") == local("torch_dist")
    assert store.calls["upload_part"] == 1  # the probe: an object of one part is put whole


def test_what_is_written_is_read_back_and_verified(source: Path, store: CountedStore) -> None:
    report = reshard(source, f"{URL}/run", to="torch_dist", tp=2, verify=True)
    assert report.verified
    again = reshard(f"{URL}/run", f"{URL}/again", to="hf", like=source)
    assert again.tensors
    assert left_over(store) == []


@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("name", STREAMED)
def test_killed_at_every_call_it_resumes(
    source: Path, store: CountedStore, local: Callable[[str], Any], name: str, is_done: bool
) -> None:
    reshard(source, f"{URL}/whole", **FORMATS[name], threads=1)
    total = store.num_calls
    assert total > 100
    step = 1 if os.environ.get("MEGTOOL_ALL_FAULTS") else 7
    for number in range(1, total + 1, step):
        store = CountedStore()
        register_store(store)
        store_index().forget(StorePath(URL))
        store.dies_at, store.is_done = number, is_done
        with suppress(MegtoolError):
            reshard(source, f"{URL}/{name}", **FORMATS[name], threads=1)
        store.revive()
        report = None
        try:
            report = reshard(source, f"{URL}/{name}", **FORMATS[name], threads=1)
        except DestinationError as e:
            assert e.id == "destination-exists", number  # complete, but for its notes
        assert written(store, name) == local(name), number
        assert left_over(store) == [], number
        repeated = [place for place, count in store.uploads.items() if count > 1]
        assert repeated == [], (number, report)


@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "reply lost"])
@pytest.mark.parametrize("name", ["torch_dist", "hf"])
def test_several_threads_that_upload_end_with_one_error_and_resume(
    source: Path, store: CountedStore, local: Callable[[str], Any], name: str, is_done: bool
) -> None:
    reshard(source, f"{URL}/whole", **FORMATS[name], threads=4)
    total = store.num_calls
    for number in range(20, total, 23):
        store = CountedStore()
        register_store(store)
        store_index().forget(StorePath(URL))
        store.dies_at, store.is_done = number, is_done
        with suppress(MegtoolError):
            reshard(source, f"{URL}/{name}", **FORMATS[name], threads=4)
        store.revive()
        with suppress(DestinationError):  # complete, but for its notes
            reshard(source, f"{URL}/{name}", **FORMATS[name], threads=4)
        assert written(store, name) == local(name), number
        assert left_over(store) == [], number
        assert [place for place, count in store.uploads.items() if count > 1] == [], number


def test_readers_refuse_what_is_being_published(source: Path, store: CountedStore) -> None:
    reshard(source, f"{URL}/whole", **FORMATS["torch_dist"], threads=1)
    refused = 0
    for number in range(1, store.num_calls, 9):
        store = CountedStore()
        register_store(store)
        store.dies_at = number
        with pytest.raises(MegtoolError):
            reshard(source, f"{URL}/m", **FORMATS["torch_dist"], threads=1)
        store.revive()
        if not store.objects("m"):
            continue
        try:
            reshard(f"{URL}/m", f"{URL}/read", to="hf", like=source, threads=1)
        except FormatError as e:
            refused += e.id == "incomplete-publication"
        else:
            assert store.objects("m") == store.objects("m")
    assert refused


def test_an_existing_destination_is_refused_before_the_first_byte(
    source: Path, store: CountedStore
) -> None:
    store.put("run/notes.txt", b"something else")
    before = store.objects()
    with raises(DestinationError, "the destination already exists", "--overwrite"):
        reshard(source, f"{URL}/run", to="hf")
    with raises(DestinationError, "the destination already exists", "--overwrite"):
        reshard(source, f"{URL}/run", to="hf", dry_run=True)
    assert store.objects() == before


@pytest.mark.parametrize(("first", "second"), [("src/inner", "src"), ("src", "src/inner")])
def test_a_destination_inside_its_source_is_refused(
    source: Path, store: CountedStore, first: str, second: str
) -> None:
    reshard(source, f"{URL}/{first}", to="hf")
    before = store.objects()
    with raises(DestinationError, "the destination and the source", "outside the source"):
        reshard(f"{URL}/{first}", f"{URL}/{second}", to="dcp", like=source)
    assert store.objects() == before


def test_a_whole_bucket_is_refused(source: Path, store: CountedStore) -> None:
    with raises(DestinationError, "a whole bucket", "name a prefix"):
        reshard(source, URL, to="hf")


def test_overwriting_replaces_all_of_it(
    source: Path, store: CountedStore, local: Callable[[str], Any]
) -> None:
    reshard(source, f"{URL}/run", to="dcp")
    reshard(source, f"{URL}/run", **FORMATS["hf"], overwrite=True)
    assert written(store, "run") == local("hf")
    assert left_over(store) == []


def test_overwriting_is_resumed_wherever_it_stopped(
    source: Path, store: CountedStore, local: Callable[[str], Any]
) -> None:
    reshard(source, f"{URL}/run", to="dcp")
    former, begun = store.objects("run"), store.num_calls
    reshard(source, f"{URL}/run", **FORMATS["hf"], overwrite=True, threads=1)
    total = store.num_calls - begun
    for number in range(1, total + 1, 11):
        store = CountedStore()
        register_store(store)
        store_index().forget(StorePath(URL))
        reshard(source, f"{URL}/run", to="dcp")
        store.dies_at = store.num_calls + number
        with pytest.raises(MegtoolError):
            reshard(source, f"{URL}/run", **FORMATS["hf"], overwrite=True, threads=1)
        now = store.objects("run")
        if not any("publishing" in key for key in store.objects()):
            assert now in (former, local("hf")), number
        store.revive()
        reshard(source, f"{URL}/run", **FORMATS["hf"], overwrite=True, threads=1)
        assert written(store, "run") == local("hf"), number
        assert left_over(store) == [], number


def test_another_plan_starts_anew(
    source: Path, store: CountedStore, local: Callable[[str], Any]
) -> None:
    store.dies_at = 60
    with pytest.raises(StorageError):
        reshard(source, f"{URL}/run", to="dcp", threads=1)
    store.revive()
    assert left_over(store)
    report = reshard(source, f"{URL}/run", **FORMATS["hf"])
    assert any("discarded" in warning for warning in report.warnings)
    assert written(store, "run") == local("hf")
    assert left_over(store) == []


def test_a_store_that_ignores_conditions_is_refused_by_name(
    source: Path, store: CountedStore, local: Callable[[str], Any]
) -> None:
    class Careless(CountedStore):
        def put(self, key: str, data: Any, *, create: bool = False, version: str = "") -> Any:
            return super().put(key, data)

    careless = Careless()
    register_store(careless)
    with raises(DestinationError, "ignores If-None-Match", "--unsafe-store"):
        reshard(source, f"{URL}/run", **FORMATS["hf"])
    assert careless.objects() == {}


@pytest.mark.parametrize(
    "options",
    [{"to": "torch_dist", "pp": 2}, {"to": "dcp"}, {"to": "zarr"}, {"to": "safetensors"}],
    ids=lambda options: str(options["to"]),
)
def test_the_store_copies_what_is_contiguous(
    source: Path, store: CountedStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    reshard(source, f"{URL}/source", to="hf")
    reshard(source, tmp_path / "local", **options)
    before = store.calls["copy_part"]
    report = reshard(f"{URL}/source", f"{URL}/run", like=source, **options)
    assert store.calls["copy_part"] > before
    assert report.kernel_bytes > report.num_bytes // 2, report
    assert report.digested + report.inherited == 39
    assert report.unverified == 0
    here, there = contents(tmp_path / "local"), written(store, "run")
    assert here is not None
    for name in set(here) - {"megtool.json", "release/megtool.json"}:
        assert there[name] == here[name], name
    assert verify(f"{URL}/run").verdict == "ok"
    assert verify(f"{URL}/run", tmp_path / "local").verdict == "equal"


def test_a_digest_of_everything_is_asked_for(
    source: Path, store: CountedStore, local: Callable[[str], Any]
) -> None:
    reshard(source, f"{URL}/source", to="hf")
    report = reshard(f"{URL}/source", f"{URL}/run", **FORMATS["hf"], digest="all")
    assert report.kernel_bytes == 0
    assert written(store, "run") == local("hf")


def test_a_source_that_is_replaced_while_the_store_copies(
    source: Path, store: CountedStore
) -> None:
    class Replacing(CountedStore):
        def copy_part(self, *args: Any) -> Any:
            info = args[3]
            if not self.calls["copy_part"]:
                MemoryStore.put(self, info.key, bytes(info.size))
            return super().copy_part(*args)

    replacing = Replacing()
    register_store(replacing)
    reshard(source, f"{URL}/source", to="hf")
    with raises(
        SourceChangedError, "source changed while it was read", "wait until nothing writes"
    ):
        reshard(f"{URL}/source", f"{URL}/run", to="dcp", like=source)
    assert not store.objects("run")


def test_what_another_program_puts_meanwhile_is_neither_taken_nor_removed(
    source: Path, store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, foreign = store.complete_upload, dict[str, bytes]()

    def complete_late(key: str, *arguments: Any, **conditions: Any) -> Any:
        if "probe-" not in key:  # the probe puts an object there itself
            foreign[key] = b"x" * sum(part.size for part in arguments[1])
            store.put(key, foreign[key])
        return complete(key, *arguments, **conditions)

    monkeypatch.setattr(store, "complete_upload", complete_late)
    with raises(DestinationError, "another program has written this object meanwhile"):
        reshard(source, f"{URL}/out", threads=1, **FORMATS["hf"])
    (key,) = foreign
    assert store.objects()[key] == foreign[key]
    monkeypatch.undo()
    assert clean(f"{URL}/out", yes=True).removed


def test_two_runs_exclude_each_other(source: Path, store: CountedStore) -> None:
    from megtool.storage.objects.lease import Lease

    lease = Lease(StorePath(f"{URL}/.run.megtool/lock"))
    with raises(DestinationError, "is writing this destination", "wait until it has ended"):
        reshard(source, f"{URL}/run", to="hf")
    lease.release()
    reshard(source, f"{URL}/run", to="hf")
