"""Several workers read what one would have read, and the last reports the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megtool
from megtool.commands.worker_scan import ShareReport
from megtool.console import printing
from megtool.digests import files as file_digests
from megtool.errors import DestinationError, FormatError
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, location
from megtool.storage.lock import LockFile
from megtool.storage.objects.index import store_index
from megtool.storage.objects.lease import Lease
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.transport.reading import parallel_scan
from tests.support.checkpoints.fp8_trained import rank_files
from tests.support.errors import raises
from tests.support.models import tiny_llama


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parallel_scan, "PART_BYTES", 1000)
    monkeypatch.setattr(file_digests, "_PART_BYTES", 3000)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf", parts=2)


def share(function: Callable[..., Any], count: int, *paths: Path, **options: Any) -> Any:
    """The report of the last of `count` workers; the others report their shares."""
    order = [*range(1, count), 0]
    reports = [function(*paths, worker=f"{n}/{count}", **options) for n in order]
    assert all(isinstance(r, ShareReport) for r in reports[:-1])
    for number, report in enumerate(reports[:-1]):
        assert set(report.worker.missing) == set(order[number + 1 :])
        assert report.exit_status == 0
        assert "worker" in report.to_json()
        assert f"worker {order[number]} of {count}" in "\n".join(report.lines())
    assert os.listdir() == []  # the records are removed
    return reports[-1]


def same(report: Any) -> Any:
    """A report without what differs between two runs."""
    return replace(report, seconds=0.0, notes=tuple(n for n in report.notes if "workers" not in n))


TARGETS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "megatron": {"to": "megatron", "tp": 2, "pp": 2},
    "safetensors": {"to": "safetensors"},
    "zarr": {"to": "zarr"},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [2, 5])
def test_workers_verify_what_one_would(tmp_path: Path, hf: Path, target: str, count: int) -> None:
    out = tmp_path / ("out.safetensors" if target == "safetensors" else "out")
    megtool.reshard(hf, out, **TARGETS[target])
    assert same(share(megtool.verify, count, out)) == same(megtool.verify(out))
    assert same(share(megtool.verify, count, hf, out)) == same(megtool.verify(hf, out))


def test_workers_read_a_checkpoint_in_a_store(tmp_path: Path, hf: Path) -> None:
    register_store(MemoryStore("memory://scans"))
    out = location("memory://scans/out")
    megtool.reshard(hf, out, **TARGETS["torch_dist"])
    assert same(share(megtool.verify, 2, out)) == same(megtool.verify(out))
    assert same(share(megtool.verify, 2, hf, out)) == same(megtool.verify(hf, out))
    one = megtool.inspect(out, stats=True)
    assert share(megtool.inspect, 2, out, stats=True).tensors == one.tensors


def test_a_record_of_an_object_that_was_replaced_is_not_used(tmp_path: Path, hf: Path) -> None:
    store = MemoryStore("memory://replaced")
    register_store(store)
    out = location("memory://replaced/out.safetensors")
    megtool.reshard(hf, out, to="safetensors")
    assert megtool.verify(out, worker="0/2").worker.missing == (1,)
    data = bytearray(out.read_bytes())
    data[-1] ^= 1
    store.put("out.safetensors", bytes(data))
    store_index().forget(location("memory://replaced"))
    assert megtool.verify(out, worker="1/2").worker.missing == (0,)
    assert megtool.verify(out, worker="0/2").exit_status == 7


@pytest.mark.parametrize("folder", ["/proc", "missing/folder"])
def test_a_folder_that_cannot_have_records_is_refused(hf: Path, folder: str) -> None:
    with raises(DestinationError, id="destination-not-writable") as caught:
        megtool.verify(hf, worker="0/2", worker_dir=folder)
    assert "--worker-dir" in str(caught.value.hint)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [2, 5])
def test_workers_find_every_flipped_bit(tmp_path: Path, hf: Path, target: str, count: int) -> None:
    out = tmp_path / ("out.safetensors" if target == "safetensors" else "out")
    megtool.reshard(hf, out, **TARGETS[target])
    files = sorted((p for p in out.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim = out if out.is_file() else files[-1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    for paths in ([out], [hf, out]):
        alone = megtool.verify(*paths)
        report = share(megtool.verify, count, *paths)
        assert same(report) == same(alone)
        assert report.exit_status == 7 or len(paths) == 2  # it may be in no tensor


def test_workers_compare_within_a_tolerance(tmp_path: Path, hf: Path) -> None:
    other = tiny_llama.save(tmp_path / "other", seed=1)
    for options in ({}, {"atol": 0.01}, {"rtol": 0.1}):
        alone = megtool.verify(hf, other, **options)
        assert same(share(megtool.verify, 3, hf, other, **options)) == same(alone)


def test_workers_compare_a_quantized_folder(tmp_path: Path, hf: Path) -> None:
    megtool.quantize(hf, tmp_path / "fp8", recipe="fp8_per_channel")
    alone = megtool.verify(hf, tmp_path / "fp8")
    assert alone.weights
    assert same(share(megtool.verify, 3, hf, tmp_path / "fp8")) == same(alone)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_workers_measure_what_one_would(hf: Path, count: int) -> None:
    alone = megtool.inspect(hf, stats=True, threads=3)
    report = share(megtool.inspect, count, hf, stats=True)
    assert report.tensors == alone.tensors


def test_workers_inspect_amaxes_as_one_would(tmp_path: Path) -> None:
    ranks = rank_files(tmp_path)
    alone = megtool.inspect_amax(ranks)
    assert alone.compared
    report = share(megtool.inspect_amax, 3, ranks)
    assert report.modules == alone.modules
    assert report.exit_status == alone.exit_status


def test_two_that_find_all_complete_report_once(hf: Path) -> None:
    alone = megtool.inspect(hf, stats=True)
    for _ in range(5):
        reports: list[Any] = []

        def work(number: int, reports: list[Any] = reports) -> None:
            reports.append(megtool.inspect(hf, stats=True, worker=f"{number}/3"))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole = [r for r in reports if not isinstance(r, ShareReport)]
        assert [r.tensors for r in whole] == [alone.tensors]
        assert os.listdir() == []


def test_records_lie_where_they_are_told(tmp_path: Path, hf: Path) -> None:
    megtool.verify(hf, hf, worker="0/2", worker_dir=tmp_path / "work")
    (folder,) = (tmp_path / "work").iterdir()
    assert folder.name.startswith(".megtool-verify-")
    # Other options, and another state of the source, are another scan.
    megtool.verify(hf, hf, worker="0/2", worker_dir=tmp_path / "work", atol=1.0)
    (hf / "config.json").touch()
    megtool.verify(hf, hf, worker="0/2", worker_dir=tmp_path / "work")
    assert len(list((tmp_path / "work").iterdir())) == 3


@pytest.fixture
def scratch() -> StorePath:
    """A prefix of a store for records; what is there is looked up in the store itself."""
    register_store(MemoryStore("memory://scratch"))
    found = location("memory://scratch/runs")
    assert isinstance(found, StorePath)
    return found


def keys(folder: StorePath) -> list[str]:
    return [info.key for info in folder.store.list(folder.key, recursive=True).objects]


@pytest.mark.parametrize("count", [2, 3])
def test_records_lie_in_a_store(hf: Path, scratch: StorePath, count: int) -> None:
    alone = megtool.verify(hf, hf)
    assert same(share(megtool.verify, count, hf, hf, worker_dir=scratch)) == same(alone)
    assert keys(scratch) == []
    first, again = (
        megtool.inspect(hf, stats=True, worker="0/2", worker_dir=scratch) for _ in range(2)
    )
    assert first.worker.num_bytes
    assert not again.worker.num_bytes
    assert [key.rpartition("/")[2] for key in keys(scratch)] == ["worker-0.record"]
    last = megtool.inspect(hf, stats=True, worker="1/2", worker_dir=scratch)
    assert last.tensors == megtool.inspect(hf, stats=True).tensors
    assert keys(scratch) == []
    assert os.listdir() == []


def test_a_worker_runs_once_in_a_store(hf: Path, scratch: StorePath) -> None:
    megtool.verify(hf, hf, worker="0/2", worker_dir=scratch)
    folder = scratch / keys(scratch)[0].split("/")[-2]
    held = Lease(folder / "worker-1.lock")
    try:
        with raises(DestinationError, id="destination-locked"):
            megtool.verify(hf, hf, worker="1/2", worker_dir=scratch)
        (row,) = megtool.clean(scratch, yes=True).left_overs
        assert row.contents == "2 objects, of workers of `verify`"
        assert row.holder
        assert len(keys(scratch)) == 2
    finally:
        held.release()
    megtool.clean(scratch, yes=True)
    assert keys(scratch) == []


def test_a_damaged_record_in_a_store_is_named(hf: Path, scratch: StorePath) -> None:
    megtool.inspect(hf, stats=True, worker="0/2", worker_dir=scratch)
    (key,) = keys(scratch)
    scratch.store.put(key, b"{}")
    with raises(FormatError, file=f"memory://scratch/{key}"):
        megtool.inspect(hf, stats=True, worker="1/2", worker_dir=scratch)


def test_a_store_that_is_only_read_has_no_records(hf: Path) -> None:
    with raises(DestinationError, id="destination-not-writable") as caught:
        megtool.verify(hf, worker="0/2", worker_dir="https://example.invalid/records")
    assert "only read" in caught.value.message
    assert "--worker-dir" in str(caught.value.hint)


def test_a_worker_that_is_started_again_does_not_read_again(hf: Path) -> None:
    first = megtool.inspect(hf, stats=True, worker="0/2")
    again = megtool.inspect(hf, stats=True, worker="0/2")
    assert first.worker.num_bytes
    assert not again.worker.num_bytes
    assert again.worker.missing == (1,)


def test_a_damaged_record_is_named(tmp_path: Path, hf: Path) -> None:
    megtool.inspect(hf, stats=True, worker="0/2")
    (record,) = (tmp_path / "work").rglob("*.record")
    record.write_bytes(record.read_bytes().replace(b"statistics", b"statistick"))
    with raises(FormatError, file=str(record)):
        megtool.inspect(hf, stats=True, worker="1/2")
    record.unlink()
    assert megtool.inspect(hf, stats=True, worker="0/2").tensors


def test_records_are_there_until_the_report_is_printed(hf: Path) -> None:
    megtool.verify(hf, hf, worker="0/2")
    with printing():
        report = megtool.verify(hf, hf, worker="1/2")
        assert report.exit_status == 0
        assert len(os.listdir()) == 1
    assert os.listdir() == []


def test_records_stay_if_the_report_is_not_printed(hf: Path) -> None:
    megtool.verify(hf, hf, worker="0/2")

    def verify() -> None:
        with printing():
            megtool.verify(hf, hf, worker="1/2")
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        verify()
    assert not isinstance(megtool.verify(hf, hf, worker="1/2"), ShareReport)
    assert os.listdir() == []


def test_a_worker_that_has_read_its_share_before_states_none(hf: Path) -> None:
    first, again = (megtool.verify(hf, hf, worker="0/2") for _ in range(2))
    assert "share" in dict(first.rows())
    assert "share" not in dict(again.rows())
    assert "worker 0 of 2 (--worker) is complete" in dict(again.rows())["worker"]


def test_records_of_a_scan_that_was_given_up_are_cleaned() -> None:
    folder = Path(".megtool-verify-0123456789abcdef")
    folder.mkdir()
    (folder / "worker-0.record").write_bytes(b"{}")
    (folder / "worker-0.lock").write_bytes(b"")
    (row,) = megtool.clean(".").left_overs
    assert row.contents == "2 files, of workers of `verify`"
    held = LockFile(Files(), folder / "worker-1.lock", lambda: None)
    try:
        assert megtool.clean(".", yes=True).left_overs[0].holder
        assert (folder / "worker-0.record").exists()
    finally:
        held.release()
    megtool.clean(".", yes=True)
    assert os.listdir() == []
