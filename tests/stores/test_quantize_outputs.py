"""Calibration files and HTML reports that are written to a store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool import derive_amax, export, quantize
from megtool.errors import DestinationError, StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import store_index
from megtool.storage.stores.connect import register_store
from tests.support.checkpoints.fp8_trained import rank_files
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_text
from tests.support.quant.quantize_sizes import SIZES, SMALL
from tests.support.stores.memory_stores import PART_BYTES, URL, CountedStore

FILE = "calibration.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("made") / "hf", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def local(model: Path) -> Path:
    """What is written to a disk: a calibration file, and the checkpoint."""
    root = model.parent / "local"
    root.mkdir()
    quantize(model, root / "fp8", "fp8", save_calibration=root / FILE, **SMALL)
    return root


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # for finished layers
    monkeypatch.setattr(part_layout, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(part_layout, "LEAST_BYTES", PART_BYTES)
    store = CountedStore()
    register_store(store)
    store_index().forget(StorePath(URL))
    yield store
    store_index().forget(StorePath(URL))


def calibrate(model: Path, destination: str, **options: Any) -> Any:
    return quantize(model, destination, "fp8", calibrate_only=True, **SMALL, **options)


def test_a_calibration_in_a_store_is_that_on_a_disk(
    model: Path, local: Path, store: CountedStore
) -> None:
    report = calibrate(model, f"{URL}/{FILE}")
    assert report.calibration_file == f"{URL}/{FILE}"
    assert store.objects() == {FILE: (local / FILE).read_bytes()}
    assert len(store.uploads) > 3  # parts, not one object
    quantize(model, f"{URL}/fp8", "fp8", calibration=[f"{URL}/{FILE}"], threads=1)
    assert store.objects("fp8") == contents(local / "fp8")
    with raises(DestinationError, id="destination-exists"):
        calibrate(model, f"{URL}/{FILE}")
    calibrate(model, f"{URL}/{FILE}", overwrite=True)
    assert store.objects()[FILE] == (local / FILE).read_bytes()
    assert store.num_uploads == 0


def test_a_checkpoint_a_calibration_and_a_report(
    model: Path, local: Path, store: CountedStore
) -> None:
    pytest.importorskip("plotly")
    report = quantize(
        model,
        f"{URL}/run/fp8",
        "fp8",
        save_calibration=f"{URL}/run/{FILE}",
        report=f"{URL}/run/fp8.html",
        **SMALL,
    )
    assert report.page == f"{URL}/run/fp8.html"
    objects = store.objects("run")
    assert objects.pop("fp8.html").startswith(b"<!doctype html>")
    assert objects.pop(FILE) == (local / FILE).read_bytes()
    assert objects == {
        f"fp8/{name}": data for name, data in (contents(local / "fp8") or {}).items()
    }


def test_an_importance_matrix(
    model: Path, local: Path, tmp_path: Path, store: CountedStore
) -> None:
    pytest.importorskip("gguf")
    options = {"to": "gguf", "outtype": "q4_0"}
    export(
        model,
        tmp_path / "m.gguf",
        **options,
        imatrix=local / FILE,
        save_imatrix=tmp_path / "i.gguf",
    )
    store.put(FILE, (local / FILE).read_bytes())
    with raises(DestinationError, "DST and --save-imatrix are the same path"):
        export(model, f"{URL}/m", **options, imatrix=f"{URL}/{FILE}", save_imatrix=f"{URL}/m")
    export(model, f"{URL}/m.gguf", **options, imatrix=f"{URL}/{FILE}", save_imatrix=f"{URL}/i.gguf")
    assert store.objects()["i.gguf"] == (tmp_path / "i.gguf").read_bytes()
    assert store.objects()["m.gguf"] == (tmp_path / "m.gguf").read_bytes()
    export(model, tmp_path / "again.gguf", **options, imatrix=f"{URL}/i.gguf")
    assert tensor_bytes(tmp_path / "again.gguf") == tensor_bytes(tmp_path / "m.gguf")


def tensor_bytes(path: Path) -> dict[str, bytes]:
    gguf = pytest.importorskip("gguf")
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}


def test_a_derived_calibration(tmp_path: Path, store: CountedStore) -> None:
    ranks = rank_files(tmp_path)
    derive_amax(ranks, tmp_path / "cal")
    derive_amax(ranks, f"{URL}/cal")
    assert store.objects() == {"cal": (tmp_path / "cal").read_bytes()}
    with raises(DestinationError, id="destination-exists"):
        derive_amax(ranks, f"{URL}/cal")


def test_a_store_that_fails_keeps_nothing_of_a_calibration(
    model: Path, store: CountedStore
) -> None:
    class FullStore(CountedStore):
        """Takes two parts of an upload."""

        def upload_part(self, *args: Any) -> Any:
            if self.calls["upload_part"] > 2:
                raise StorageError("the quota is reached", file=URL)
            return super().upload_part(*args)

    full = FullStore()
    register_store(full)
    with raises(StorageError, "the quota is reached"):
        calibrate(model, f"{URL}/{FILE}")
    assert full.objects() == {}
    assert full.num_uploads == 0


@pytest.mark.parametrize("option", ["save_calibration", "report"])
def test_outputs_that_cannot_be_put_are_refused_before_any_work(
    model: Path, store: CountedStore, option: str
) -> None:
    store.put("folder.html/file", b"something else")
    options = {"recipe": "fp8", **SMALL}
    with raises(DestinationError, "this is a folder"):
        quantize(model, f"{URL}/out", **options, **{option: f"{URL}/folder.html"})
    with raises(DestinationError, id="destination-not-writable"):
        quantize(model, f"{URL}/out", **options, **{option: "https://localhost/file.html"})
    assert store.objects() == {"folder.html/file": b"something else"}
