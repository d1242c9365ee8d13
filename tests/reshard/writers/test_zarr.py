"""Folders of arrays among the other formats: every way there and back keeps bytes and state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megtool import reshard, verify
from megtool.errors import UsageError
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama

zarr = pytest.importorskip("zarr")
pytest.importorskip("tensorstore")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf")


@pytest.mark.parametrize("kind", ["zarr", "tensorstore", "ocdbt"])
def test_hugging_face_and_back(tmp_path: Path, hf: Path, kind: str) -> None:
    assert reshard(hf, tmp_path / "arrays", to=kind).dropped == ()
    found = open_checkpoint(tmp_path / "arrays")
    assert found.format == kind
    assert "hf/config.json" in found.auxiliary_files
    assert verify(hf, tmp_path / "arrays").differences == ()
    reshard(tmp_path / "arrays", tmp_path / "same")
    assert open_checkpoint(tmp_path / "same").format == kind
    reshard(tmp_path / "same", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(hf)
    assert (tmp_path / "back/config.json").read_bytes() == (hf / "config.json").read_bytes()


@pytest.mark.parametrize("kind", ["zarr", "tensorstore", "ocdbt"])
def test_megatrons_state_travels(tmp_path: Path, hf: Path, kind: str) -> None:
    reshard(hf, tmp_path / "save", to="torch_dist", tp=2, pp=2)
    before = open_checkpoint(tmp_path / "save")
    assert reshard(tmp_path / "save", tmp_path / "arrays", to=kind).dropped == ()
    found = open_checkpoint(tmp_path / "arrays")
    assert found.objects.keys() == before.objects.keys()
    assert found.metadata["args"] == before.metadata["args"]
    reshard(tmp_path / "arrays", tmp_path / "again", to="torch_dist", tp=2, pp=2)
    after = open_checkpoint(tmp_path / "again")
    assert after.metadata["args"] == before.metadata["args"]
    assert after.objects.keys() == before.objects.keys()
    assert verify(tmp_path / "save", tmp_path / "again").differences == ()


def test_megatrons_old_zarr_becomes_torch_dist(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "new", to="torch_dist")
    there = open_checkpoint(tmp_path / "new")
    reshard(tmp_path / "new", tmp_path / "arrays", to="zarr")
    old = tmp_path / "old/iter_0000005"
    old.mkdir(parents=True)
    for name, array in zarr.open_group(tmp_path / "arrays", mode="r").members():
        how = {"shape": array.shape, "chunks": array.shape, "dtype": array.dtype}
        made = zarr.create_array(
            old / name, zarr_format=2, compressors=None, fill_value=None, **how
        )
        made[...] = array[...]
        file = old / name / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    (old / "rng_state").mkdir()
    torch.save({"seed": torch.arange(3)}, old / "rng_state/shard_0.0_1.1.pt")
    (old / "common.pt").write_bytes((there.root / "common.pt").read_bytes())
    (old / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    report = reshard(tmp_path / "old", tmp_path / "out", to="torch_dist", like=hf)
    assert report.dropped == ()
    assert verify(tmp_path / "out", hf, like=hf).differences == ()
    out = open_checkpoint(tmp_path / "out")
    file, offset, length = out.objects["rng_state/shard_0.0_1.1"].extent
    item = tmp_path / "item"
    item.write_bytes(out.path(file).read_bytes()[offset : offset + length])
    (held,) = torch.load(item)
    np.testing.assert_array_equal(held["seed"], np.arange(3))


def test_layouts_of_ranks_mean_nothing(tmp_path: Path, hf: Path) -> None:
    with raises(UsageError, "--tp", "--to"):
        reshard(hf, tmp_path / "out", to="zarr", tp=2)


@pytest.mark.parametrize("how", ["zstd", "blosc"])
def test_compressed_arrays(tmp_path: Path, hf: Path, how: str) -> None:
    reshard(hf, tmp_path / "arrays", to="zarr", compress=how, max_shard_size="1MiB")
    assert open_checkpoint(tmp_path / "arrays").encoded_chunks is not None
    assert verify(hf, tmp_path / "arrays").differences == ()
    reshard(tmp_path / "arrays", tmp_path / "back", to="hf")
    assert stored_tensors(tmp_path / "back") == stored_tensors(hf)
    with raises(UsageError, "--compress", "--to"):
        reshard(hf, tmp_path / "out", to="dcp", compress=how)


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_tensorstore_reads_the_database(tmp_path: Path, hf: Path, compress: str | None) -> None:
    import tensorstore as ts

    reshard(hf, tmp_path / "db", to="ocdbt", compress=compress)
    assert {p.name for p in (tmp_path / "db").iterdir()} >= {"manifest.ocdbt", "d", "hf"}
    assert not list((tmp_path / "db").rglob("zarr.json"))
    held = stored_tensors(hf)
    assert held
    for name in held:
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/db/", "path": f"{name}/"}
        array = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
        assert array.read().result().tobytes() == read_bytes(hf, name), name


def read_bytes(folder: Path, name: str) -> bytes:
    """A tensor of a safetensors folder, as its bytes."""
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            if name in set(f.keys()):
                return f.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
    raise KeyError(name)


def test_a_database_that_was_stopped_is_begun_anew(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megtool.errors import StorageError
    from megtool.formats.zarr import tensorstore

    settle, calls = tensorstore._flush, []
    monkeypatch.setattr(tensorstore, "_BATCH_BYTES", 1 << 10)

    def fail_late(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise StorageError("no more")
        settle(*args)

    monkeypatch.setattr(tensorstore, "_flush", fail_late)
    with pytest.raises(StorageError, match="no more"):
        reshard(hf, tmp_path / "db", to="ocdbt")
    assert not (tmp_path / "db").exists()
    monkeypatch.setattr(tensorstore, "_flush", settle)
    report = reshard(hf, tmp_path / "db", to="ocdbt")
    assert report.resumed_units
    assert verify(hf, tmp_path / "db").differences == ()
