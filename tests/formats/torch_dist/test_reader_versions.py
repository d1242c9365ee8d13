"""torch_dist as core versions write it: common state, checksums, unfinished saves."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megtool.dtypes import dtype
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.formats.torch_dist.integrity import check_integrity, read_integrity
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.pickles.writer import make_namespace
from megtool.tensors.catalogue import Destination
from megtool.tensors.sharded import GlobalTensor, Shards
from tests.support.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Materialize = Callable[[Destination, Path, dict[str, np.ndarray]], None]


def save(
    root: Path,
    materialize: Materialize,
    *,
    core_version: str | None = None,
    iteration: int | None = 3,
    **more: Any,
) -> Path:
    """A small save folder: the folder of its iteration."""
    tensor = GlobalTensor(name="a.weight", shape=(4, 6), dtype=dtype("float32"))
    laid = plan_torch_dist_layout(
        [tensor],
        Shards.build([(0, [0, 0], [2, 6], 0), (0, [2, 0], [4, 6], 1)], 2),
        num_files=2,
        megatron=MegatronSave(
            common={"args": make_namespace({"x": 1}), "iteration": iteration or 0, "t": (1, 2.5)},
            iteration=iteration,
            core_version=core_version,
        ),
        **more,
    )
    materialize(laid, root, {"a.weight": np.arange(24, dtype="<f4").reshape(4, 6)})
    return root / ("release" if iteration is None else f"iter_{iteration:07d}")


@pytest.mark.parametrize("version", [None, "0.13", "0.16.1", "0.18", "0.19", "0.20.0rc1", "1.0"])
@pytest.mark.parametrize("with_objects", [False, True])
def test_common_state_lies_where_the_version_looks(
    version: str | None, with_objects: bool, tmp_path: Path, materialize: Materialize
) -> None:
    objects = {"rng_state/shard_0.0_1.1": {"seed": 1}} if with_objects else {}
    folder = save(tmp_path, materialize, core_version=version, objects=objects)
    is_inside = version in ("0.19", "0.20.0rc1", "1.0")
    assert (folder / "common.pt").exists() != is_inside
    assert len(json.loads((folder / "metadata.json").read_text())) == (2 if is_inside else 4)
    c = open_checkpoint(tmp_path)
    assert c.metadata["args"] == {"x": 1}
    assert c.metadata["common"]["t"] == (1, 2.5)
    assert c.metadata["iteration"] == 3
    assert list(c.objects) == list(objects)
    assert not c.warnings


def test_common_state_inside_is_an_item_torch_loads(
    tmp_path: Path, materialize: Materialize
) -> None:
    folder = save(tmp_path, materialize, core_version="0.19")
    into: dict[str, Any] = {"a.weight": torch.zeros(4, 6)}
    dcp.load(into, checkpoint_id=str(folder), no_dist=True)
    assert torch.equal(into["a.weight"], torch.arange(24.0).reshape(4, 6))
    reader = dcp.FileSystemReader(str(folder))
    held = reader.read_metadata()
    assert "common_state/shard_0_1" in held.state_dict_metadata
    index, info = next((i, s) for i, s in held.storage_data.items() if "common" in i.fqn)
    with (folder / info.relative_path).open("rb") as f:
        f.seek(info.offset)
        data = f.read(info.length)
    item = tmp_path / "item.pt"
    item.write_bytes(data)
    (common,) = torch.load(item, weights_only=False)
    assert common["args"].x == 1
    assert index.fqn == "common_state/shard_0_1"


@pytest.mark.parametrize("version", ["", "new", "0", "19", "0.x", "0.1", "0.12.9"])
def test_a_version_that_is_none(version: str, tmp_path: Path, materialize: Materialize) -> None:
    with pytest.raises(UsageError, match="core version"):
        save(tmp_path, materialize, core_version=version)


def test_train_state_is_copied_beside_the_iterations(
    tmp_path: Path, materialize: Materialize
) -> None:
    folder = save(
        tmp_path, materialize, small_files={"train_state.pt": b"state", "run_config.yaml": b""}
    )
    assert (tmp_path / "latest_train_state.pt").read_bytes() == b"state"
    found = open_checkpoint(folder).auxiliary_files
    assert sorted(found) == ["run_config.yaml", "train_state.pt"]


# ---- checksums


def sign(folder: Path, algorithm: str = "sha256") -> dict[str, str]:
    """Write the integrity.json of Megatron-Core 0.18."""
    files = {
        p.name: hashlib.new(algorithm, p.read_bytes()).hexdigest()
        for p in sorted(folder.iterdir())
        if p.is_file()
    }
    text = json.dumps({"algorithm": algorithm, "files": files})
    (folder / "integrity.json").write_text(text)
    return files


def test_checksums_hold_or_name_the_file(tmp_path: Path, materialize: Materialize) -> None:
    folder = save(tmp_path, materialize)
    assert read_integrity(folder) is None
    assert check_integrity(folder) is None
    files = sign(folder)
    said = read_integrity(folder)
    assert said is not None
    assert said.files == files
    assert check_integrity(folder) == []
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__1_0.distcp").write_bytes(data)
    (folder / "common.pt").unlink()
    found = {u.file: u.reason for u in check_integrity(folder, threads=1) or ()}
    assert found.keys() == {"__1_0.distcp", "common.pt"}
    assert found["__1_0.distcp"].startswith("sha256 is ")
    assert "missing" in found["common.pt"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "checksum algorithm None"),
        ('{"algorithm": "crc", "files": {}}', "checksum algorithm 'crc'"),
        ('{"algorithm": "sha256"}', "lists no files"),
        ('{"algorithm": "sha256", "files": {"../x": "' + "0" * 64 + '"}}', "of the file '../x'"),
        ('{"algorithm": "sha256", "files": {"a": "zz"}}', "checksum 'zz'"),
        ('{"algorithm": "sha256", "files": {"a": 7}}', "checksum 7"),
        ("{", "JSON"),
    ],
)
def test_checksums_that_are_none(
    text: str, says: str, tmp_path: Path, materialize: Materialize
) -> None:
    folder = save(tmp_path, materialize)
    (folder / "integrity.json").write_text(text)
    with pytest.raises(FormatError, match=says):
        check_integrity(folder)


def test_a_listed_link_out_of_the_folder_is_not_read(
    tmp_path: Path, materialize: Materialize
) -> None:
    folder = save(tmp_path / "save", materialize)
    (tmp_path / "secret").write_text("x")
    (folder / "secret").symlink_to(tmp_path / "secret")
    sign(folder)
    with pytest.raises(FormatError, match="secret"):
        check_integrity(folder)


# ---- unfinished and unknown


UNFINISHED: dict[str, tuple[str, ...]] = {
    "no metadata.json": ("metadata.json",),
    "no .metadata": (".metadata",),
    "neither": ("metadata.json", ".metadata"),
    "data alone": ("metadata.json", ".metadata", "common.pt"),
}


@pytest.mark.parametrize("version", [None, "0.19"])
@pytest.mark.parametrize("lacks", UNFINISHED)
def test_an_unfinished_save_names_the_last_complete_one(
    lacks: str, version: str | None, tmp_path: Path, materialize: Materialize
) -> None:
    for iteration in (9999998, 9999999):
        save(tmp_path, materialize, iteration=iteration, core_version=version)
    folder = save(tmp_path, materialize, iteration=10000000, core_version=version)
    for name in UNFINISHED[lacks]:
        (folder / name).unlink(missing_ok=True)
    for path in (tmp_path, folder):
        with raises(FormatError, id="unfinished-save") as e:
            open_checkpoint(path)
        assert str(tmp_path / "iter_9999999") in str(e.value.hint)
    assert open_checkpoint(tmp_path, iteration=9999999).metadata["iteration"] == 9999999
    shutil.rmtree(tmp_path / "iter_9999999")
    shutil.rmtree(tmp_path / "iter_9999998")
    with raises(FormatError, id="unfinished-save") as e:
        open_checkpoint(folder)
    assert e.value.hint == "there is no complete one"


@pytest.mark.parametrize("backend", ["fsdp_dtensor", 7, None])
def test_another_back_end_is_named(backend: Any, tmp_path: Path, materialize: Materialize) -> None:
    folder = save(tmp_path, materialize)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    with pytest.raises(FormatError, match="sharded backend") as e:
        open_checkpoint(folder)
    assert repr(backend) in e.value.message
