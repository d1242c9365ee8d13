"""What interrupted runs leave is listed, and removed on request, but never under a live run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool import clean, inspect, reshard
from megtool.errors import FormatError, StorageError
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.qparams import QParams
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.objects.lease import Lease
from megtool.storage.stores.connect import register_store
from tests.support.folders import contents, staging_folders
from tests.support.models import tiny_llama
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "source")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountedStore:
    monkeypatch.setattr(part_layout, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    store = CountedStore()
    register_store(store)
    store_index().forget(StorePath(URL))
    return store


def stop_early(source: Path, store: CountedStore, name: str, after: int, **options: object) -> None:
    """Kill a reshard to the store at a call."""
    store.dies_at = store.num_calls + after
    with pytest.raises(StorageError):
        reshard(source, f"{URL}/{name}", to="hf", threads=1, **options)
    store.revive()


def is_read(location: str) -> bool:
    """Whether a reader takes what is there for a checkpoint."""
    try:
        inspect(location)
    except FormatError:
        return False
    return True


def leave_folder(destination: Path) -> None:
    """What a killed run leaves beside a local destination: a finished unit, and no lock."""
    stage = open_stage(destination, files=Files(), fingerprint="plan")
    stage.__enter__()
    stage.write("file", b"data")
    stage.finish(0)
    stage.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


# ---- on a disk


def test_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    report = clean(tmp_path)
    assert report.left_overs == ()
    assert "no run has left anything" in report.title()


@pytest.mark.parametrize("place", ["model", "", "runs"])
def test_a_folder_is_listed_and_removed_on_request(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    leave_folder(folder / "model")
    location = {"model": folder / "model", "": tmp_path, "runs": folder}[place]
    before = contents(tmp_path)
    (row,) = clean(location).left_overs
    assert (row.destination, row.staging) == (folder / "model", folder / ".model.megtool")
    assert row.num_bytes > 4
    assert contents(tmp_path) == before
    report = clean(location, yes=True)
    assert len(report.removed) == 1
    assert staging_folders(folder) == []
    assert clean(location).left_overs == ()


def test_a_live_run_on_a_disk_is_left_alone(tmp_path: Path) -> None:
    with open_stage(tmp_path / "model", files=Files(), fingerprint="plan") as stage:
        stage.write("file", b"data")
        report = clean(tmp_path, yes=True)
        (row,) = report.left_overs
        assert "process" in row.holder
        assert report.removed == ()
        assert (stage.tree / "file").read_bytes() == b"data"
        stage.discard()


def test_former_contents_are_put_back(tmp_path: Path) -> None:
    leave_folder(tmp_path / "model")
    (tmp_path / ".model.megtool" / "old").mkdir()
    (tmp_path / ".model.megtool" / "old" / "weights").write_bytes(b"former")
    clean(tmp_path / "model", yes=True)
    assert contents(tmp_path) == {"model/weights": b"former"}


def test_former_contents_are_never_lost(tmp_path: Path) -> None:
    leave_folder(tmp_path / "model")
    (tmp_path / ".model.megtool" / "old").mkdir()
    (tmp_path / ".model.megtool" / "old" / "weights").write_bytes(b"former")
    (tmp_path / "model").mkdir()
    before = contents(tmp_path)
    report = clean(tmp_path, yes=True)
    assert report.removed == ()
    assert contents(tmp_path) == before


# ---- in a store


@pytest.mark.parametrize("place", ["run/model", "run", ""])
def test_uploads_are_listed_and_aborted_on_request(
    source: Path, store: CountedStore, place: str
) -> None:
    store.put("run/other/config.json", b"{}")
    stop_early(source, store, "run/model", 40, overwrite=True)
    before = store.objects(), store.num_uploads
    assert store.num_uploads
    location = f"{URL}/{place}" if place else URL
    (row,) = clean(location).left_overs
    assert str(row.destination) == f"{URL}/run/model"
    assert "under way" in row.contents
    assert row.num_bytes > 10 * PART_BYTES
    assert (store.objects(), store.num_uploads) == before
    report = clean(location, yes=True)
    assert len(report.removed) == 1
    assert store.objects() == {"run/other/config.json": b"{}"}
    assert store.num_uploads == 0


def test_an_incomplete_publication_is_removed_whole(source: Path, store: CountedStore) -> None:
    reshard(source, f"{URL}/whole", to="hf", threads=1)  # with the probe of the store
    begun = store.num_calls
    reshard(source, f"{URL}/again", to="hf", threads=1)
    total = store.num_calls - begun
    outcomes = set()
    for after in (*range(total - 30, total - 12, 6), *range(total - 12, total)):
        stop_early(source, store, "run", after)
        is_complete = is_read(f"{URL}/run")
        assert clean(f"{URL}/run").left_overs, after
        clean(f"{URL}/run", yes=True)
        assert store.objects("run") == (store.objects("whole") if is_complete else {}), after
        assert [key for key in store.objects() if "megtool/" in key] == [], after
        assert store.num_uploads == 0, after
        store.delete([f"run/{name}" for name in store.objects("run")])
        outcomes.add(is_complete)
    assert outcomes == {True, False}


def test_a_live_run_in_a_store_is_left_alone(source: Path, store: CountedStore) -> None:
    stop_early(source, store, "run", 40)
    lease = Lease(StorePath(f"{URL}/.run.megtool/lock"))
    before = store.objects()
    report = clean(URL, yes=True)
    (row,) = report.left_overs
    assert "process" in row.holder
    assert report.removed == ()
    assert store.objects() == before
    lease.release()
    assert len(clean(URL, yes=True).removed) == 1


def test_the_note_of_workers_is_told_from_an_interrupted_run(
    source: Path, store: CountedStore
) -> None:
    for n in range(2):
        reshard(source, f"{URL}/out", to="dcp", worker=f"{n}/2")
    (row,) = clean(URL).left_overs
    assert row.contents == "1 object, of a complete checkpoint, which stays"


def test_uploads_of_other_programs_are_listed_only(store: CountedStore) -> None:
    store.begin_upload("run/theirs.bin")
    report = clean(f"{URL}/run", yes=True)
    (row,) = report.left_overs
    assert row.staging is None
    assert report.removed == ()
    assert store.num_uploads == 1
    assert report.to_json()["left_overs"][0]["removed"] is False


def test_the_folder_of_an_interrupted_calibration_is_known(tmp_path: Path) -> None:
    work = tmp_path / ".out.calibration"
    resume = ResumeFolder(
        work, fingerprint=Fingerprint(model="m", recipe="r", data="d"), settings={"samples": 2}
    )
    with resume.claim():
        resume.write_unit(0, {}, QParams())
        (row,) = clean(tmp_path, yes=True).left_overs
        assert row.holder
        assert work.exists()
    for place in (tmp_path, tmp_path / "out"):
        (row,) = clean(place).left_overs
        assert (row.destination, row.holder) == (tmp_path / "out", "")
        assert row.num_bytes > 100
    (work / "notes.txt").write_text("of a user")
    assert clean(tmp_path, yes=True).removed == ()
    (work / "notes.txt").unlink()
    assert len(clean(tmp_path, yes=True).removed) == 1
    assert list(tmp_path.iterdir()) == []
