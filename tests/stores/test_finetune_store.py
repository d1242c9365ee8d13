"""`finetune` saves to a store what it saves to a disk, and resumes from there."""

from __future__ import annotations

import gc
import gzip
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool import verify
from megtool.errors import DestinationError, StorageError, UsageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from megtool.train import run_log
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import save_lines, tune
from tests.support.stores.memory_stores import URL, CountedStore

STEPS = {"train_iters": 3, "save_interval": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lines(tmp_path_factory.mktemp("data"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    monkeypatch.setattr(run_log, "_FLUSH_S", math.inf)  # however slow, the same calls
    store = CountedStore(min_part_bytes=5 << 20)
    register_store(store)
    store_index().forget(StorePath(URL))
    yield store
    store_index().forget(StorePath(URL))


def losses(text: bytes) -> list[float]:
    return [row["loss"] for row in map(json.loads, text.splitlines()) if "loss" in row]


def iteration_names(store: CountedStore) -> set[str]:
    return {key.partition("/")[0] for key in store.objects("out") if key.startswith("iter_")}


def test_a_run_in_a_store_is_that_on_a_disk(
    model: Path, data: Path, tmp_path: Path, store: CountedStore
) -> None:
    tune(model, tmp_path / "out", data, **STEPS)
    report = tune(model, f"{URL}/out", data, **STEPS)
    assert report.outcome.saved_iteration == 3
    objects = store.objects("out")
    for path in sorted((tmp_path / "out").rglob("iter_*/**/*")):
        name = path.relative_to(tmp_path / "out").as_posix()
        if path.is_file() and path.name not in (
            "common.pt",
            "megtool.json",
        ):  # they hold the path of the run
            assert objects[name] == path.read_bytes(), name
    assert objects["latest_checkpointed_iteration.txt"] == b"3"
    local_log = (tmp_path / "out/log.jsonl").read_bytes()
    assert losses(objects["log.jsonl"]) == losses(local_log)
    assert verify(f"{URL}/out").verdict == "ok"
    assert verify(f"{URL}/out", tmp_path / "out").exit_status == 0
    assert not [key for key in store.objects() if ".megtool/" in key]
    assert store.num_uploads == 0


def test_a_run_resumes_from_a_store(
    model: Path, data: Path, tmp_path: Path, store: CountedStore
) -> None:
    tune(model, tmp_path / "ref", data, train_iters=4)
    tune(model, f"{URL}/out", data, train_iters=4, exit_duration_in_mins=1e-9, to="hf")
    report = tune(model, f"{URL}/out", data, train_iters=4)
    assert report.start_iteration == 1
    assert ["hf/ is of iteration 1" in note for note in report.notes] == [True]
    here = losses((tmp_path / "ref/log.jsonl").read_bytes())
    assert losses(store.objects("out")["log.jsonl"]) == here


def test_an_adapter_in_a_store_is_that_on_a_disk(
    model: Path, data: Path, tmp_path: Path, store: CountedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    options = {"train_iters": 2, "save_interval": 1, "lora_rank": 4}
    tune(model, tmp_path / "out", data, **options)
    tune(model, f"{URL}/out", data, **options, exit_duration_in_mins=1e-9)
    report = tune(model, f"{URL}/out", data, **options)
    assert (report.start_iteration, report.adapter) == (1, f"{URL}/out/iter_0000002/adapter")
    for iteration in ("iter_0000001", "iter_0000002"):
        folder = tmp_path / "out" / iteration / "adapter"
        objects = store.objects(f"out/{iteration}/adapter")
        assert set(objects) == {path.name for path in folder.iterdir()}
        for name, content in objects.items():
            if name.endswith(".safetensors"):
                assert content == (folder / name).read_bytes(), name
    assert verify(f"{URL}/out").verdict == "ok"
    assert not [key for key in store.objects() if ".megtool/" in key]
    assert store.num_uploads == 0
    gc.collect()
    assert not [*(tmp_path / "temporary").rglob("*adapter*")]


def test_a_profile_is_put_into_the_store(model: Path, data: Path, store: CountedStore) -> None:
    steps = {"train_iters": 2, "profile_step_start": 1, "profile_step_end": 2}
    tune(model, f"{URL}/out", data, **steps, profile="torch")
    objects = store.objects("out/profile")
    assert set(objects) == {"rank-0-steps-2-2.json.gz", "rank-0-steps-2-2.txt"}
    trace = json.loads(gzip.decompress(objects["rank-0-steps-2-2.json.gz"]))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def test_old_iterations_are_removed(model: Path, data: Path, store: CountedStore) -> None:
    tune(model, f"{URL}/out", data, **STEPS, most_recent_k=1)
    assert iteration_names(store) == {"iter_0000003"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_killed_while_it_saves(
    model: Path, data: Path, store: CountedStore, asynchronous: bool
) -> None:
    options = STEPS | {"async_save": asynchronous}
    tune(model, f"{URL}/first", data, **options)  # with what a process asks once
    begun = store.num_calls
    tune(model, f"{URL}/out", data, **options)
    total, whole = store.num_calls - begun, store.objects("out")
    for number in range(30, total, max(1, total // 6)):  # after the probe
        store = CountedStore(min_part_bytes=5 << 20)
        register_store(store)
        store_index().forget(StorePath(URL))
        store.dies_at = number
        with pytest.raises(StorageError):
            tune(model, f"{URL}/out", data, **options)
        store.revive()
        tracker = store.objects("out").get("latest_checkpointed_iteration.txt")
        if tracker is not None:
            iteration = f"iter_{int(tracker):07d}"
            for name, content in whole.items():
                if name.startswith(iteration) and not name.endswith(("common.pt", "megtool.json")):
                    assert store.objects("out")[name] == content, (number, name)
        tune(model, f"{URL}/out", data, **options)
        assert store.objects("out")["latest_checkpointed_iteration.txt"] == b"3"
        assert verify(f"{URL}/out").verdict == "ok"
        assert not [key for key in store.objects() if ".megtool/" in key], number
        assert store.num_uploads == 0


def test_what_a_store_cannot_hold_is_refused(model: Path, data: Path, store: CountedStore) -> None:
    with raises(UsageError, "--tensorboard writes local files", "log.jsonl"):
        tune(model, f"{URL}/out", data, tensorboard=True)
    assert store.num_calls == 0
    store.put("other/notes.txt", b"something else")
    with raises(DestinationError, "something other than a run", "DST"):
        tune(model, f"{URL}/other", data)
