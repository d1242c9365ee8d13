"""Zarr folders that megtool writes: zarr-python and tensorstore read them, equal in every byte."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.dtypes import DTYPES, dtype
from megtool.errors import UsageError
from megtool.formats import open_checkpoint
from megtool.formats.zarr.compression import compress
from megtool.formats.zarr.layout import (
    choose_chunk_shape,
    is_contiguous_chunk,
    plan_zarr_layout,
)
from megtool.plan import execute
from megtool.plan.copies import PlanSource
from megtool.plan.planner import build_plan
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from megtool.transport.reading.reader import CheckpointReader

zarr = pytest.importorskip("zarr")
ts = pytest.importorskip("tensorstore")


def source(root: Path, tensors: list[GlobalTensor]) -> tuple[Catalogue, dict[str, bytes]]:
    """All tensors one after the other in one raw file, and their bytes."""
    rng = np.random.default_rng(len(tensors))
    held = {}
    for t in tensors:
        raw = rng.integers(0, 2 if t.dtype.name == "bool" else 256, t.num_bytes, np.uint8)
        held[t.name] = raw.tobytes()
    root.mkdir(exist_ok=True)
    (root / "raw").write_bytes(b"".join(held.values()))
    rows = [(i, [0] * len(t.shape), t.shape, 0) for i, t in enumerate(tensors) if t.numel]
    size = np.array([t.num_bytes for t in tensors], np.int64)
    at = (np.cumsum(size) - size)[[r[0] for r in rows]]
    length = size[[r[0] for r in rows]]
    catalogue = Catalogue(
        format="raw",
        root=root,
        files=[StoredFile.stat(root, "raw")],
        tensors=tensors,
        shards=Shards.build(rows, widest(tensors)),
        extents=Extents(file=np.zeros(len(rows), np.int32), offset=at, length=length),
    )
    return catalogue, held


def write(
    held: Catalogue, target: Destination, root: Path, how: str | None = None, *, commit: bool = True
) -> int:
    places = {t.name: Placement.identity(t.name, t.shape) for t in held.tensors}
    plan = build_plan([PlanSource(catalogue=held, placements=places)], target, places)
    with open_stage(root, files=Files(), fingerprint=plan.fingerprint) as stage:
        report = execute.execute(plan, stage, files=Files(), threads=2)
        if how:
            compress(target, stage, how, threads=2)
        if commit:
            stage.commit(fsync=False)
    return report.repaired


def ours(root: Path) -> dict[str, bytes]:
    found = open_checkpoint(root)
    with CheckpointReader(found, Files()) as reader:
        return {t.name: reader.open_stored(t.name).read().tobytes() for t in found.tensors}


def by_zarr(root: Path, name: str) -> np.ndarray:
    group = zarr.open_group(str(root), mode="r")
    alone = zarr.open_array(str(root / name), mode="r")
    found = np.asarray(group[name][...])
    assert found.tobytes() == np.asarray(alone[...]).tobytes()
    return found


def by_tensorstore(root: Path, name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / name)}}
    return np.asarray(ts.open(spec, open=True, read=True).result().read().result())


KINDS = [d.name for d in DTYPES if d.name != "float8_e8m0fnu"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    chunk_bytes=st.integers(1, 300),
    shard_bytes=st.none() | st.integers(1, 3000),
    kind=st.sampled_from(["zarr", "tensorstore"]),
    how=st.sampled_from([None, None, "zstd", "blosc"]),
)
def test_both_libraries_read_what_is_written(
    tmp_path_factory, shapes, kinds, chunk_bytes, shard_bytes, kind, how
):
    folder = tmp_path_factory.mktemp("out")
    tensors = [
        GlobalTensor(name=f"layer/{i}.w" if i % 2 else f"t{i}", shape=tuple(s), dtype=dtype(k))
        for i, (s, k) in enumerate(zip(shapes, kinds, strict=False))
    ]
    held, wanted = source(folder / "source", tensors)
    target = plan_zarr_layout(
        tensors, kind=kind, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes, compress=how
    )
    write(held, target, folder / "out", how)
    found = open_checkpoint(folder / "out")
    assert {t.name: (t.shape, t.dtype) for t in found.tensors} == {
        t.name: (t.shape, t.dtype) for t in tensors
    }
    assert how or found.encoded_chunks is None
    assert ours(folder / "out") == wanted
    for t in tensors:
        new = t.dtype.name == "bfloat16" or t.dtype.name.startswith("float8")
        if kind == "zarr" or not new:
            array = by_zarr(folder / "out", t.name)
            assert array.shape == t.shape
            assert array.tobytes() == wanted[t.name]
        array = by_tensorstore(folder / "out", t.name)
        assert array.tobytes() == wanted[t.name]
        if kind == "tensorstore" and new:
            assert array.dtype == np.dtype(getattr(ml_dtypes, t.dtype.name))
        elif not new:
            assert array.dtype == np.dtype(t.dtype.numpy)


@given(
    shape=st.lists(st.integers(1, 9), max_size=4),
    num_bytes=st.integers(1, 5000),
)
def test_chunks_are_runs_of_at_most_the_size_asked_for(shape, num_bytes):
    kind = dtype("float32")
    chunk = choose_chunk_shape(shape, kind, num_bytes)
    assert is_contiguous_chunk(shape, chunk)
    assert numel(chunk) * 4 <= max(num_bytes, 4)


def test_files_and_their_number(tmp_path):
    t = GlobalTensor(name="w", shape=(1000, 256), dtype=dtype("float32"))
    sizes = [
        f.size for f in plan_zarr_layout([t], kind="zarr", chunk_bytes=100 << 10).catalogue.files
    ]
    assert sizes == [10 * 100 * 1024 + 10 * 16 + 4]
    files = plan_zarr_layout(
        [t], kind="zarr", chunk_bytes=100 << 10, shard_bytes=None
    ).catalogue.files
    assert [f.path for f in files] == [f"w/c/{i}/0" for i in range(10)]
    files = plan_zarr_layout(
        [t], kind="zarr", chunk_bytes=100 << 10, shard_bytes=300 << 10
    ).catalogue.files
    assert len(files) == 4
    chosen = plan_zarr_layout([t], kind="zarr", chunks={"w": (100, 64)}, shard_bytes=1 << 30)
    assert len(chosen.catalogue.shards) == 40
    held, wanted = source(tmp_path / "source", [t])
    write(held, chosen, tmp_path / "out")
    assert by_zarr(tmp_path / "out", "w").tobytes() == wanted["w"]
    assert ours(tmp_path / "out") == wanted


@pytest.mark.parametrize("how", ["zstd", "blosc"])
def test_compression_saves_and_survives_a_stopped_run(tmp_path, how):
    t = GlobalTensor(name="w", shape=(1000, 256), dtype=dtype("float32"))
    held, _ = source(tmp_path / "source", [t])
    wanted = np.arange(256000, dtype=np.float32).reshape(1000, 256)
    (tmp_path / "source/raw").write_bytes(wanted.tobytes())
    held.files[:] = [StoredFile.stat(tmp_path / "source", "raw")]
    target = plan_zarr_layout([t], kind="zarr", chunk_bytes=100 << 10, compress=how)
    assert write(held, target, tmp_path / "out", how, commit=False) == 0
    assert write(held, target, tmp_path / "out", how) > 0
    assert (tmp_path / "out/w/c/0/0").stat().st_size < wanted.nbytes * 3 // 4
    np.testing.assert_array_equal(by_zarr(tmp_path / "out", "w"), wanted)
    np.testing.assert_array_equal(by_tensorstore(tmp_path / "out", "w"), wanted)
    assert ours(tmp_path / "out")["w"] == wanted.tobytes()
    with pytest.raises(UsageError, match=r"compression .* is unknown"):
        plan_zarr_layout([t], kind="zarr", compress="rar")


def test_state_travels_beside_the_arrays(tmp_path):
    t = GlobalTensor(name="module.w", shape=(3,), dtype=dtype("bfloat16"))
    held, wanted = source(tmp_path / "source", [t])
    common = {"iteration": 4, "checkpoint_version": 3.0}
    target = plan_zarr_layout(
        [t],
        kind="zarr",
        objects={"rng_state/shard_0_1": {"seed": 3}, "w._extra_state/shard_0_2": None},
        common=common,
        small_files={"hf/config.json": b"{}"},
    )
    assert list(target.final_files) == ["metadata.json", "zarr.json"]
    write(held, target, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found.metadata["common"] == common
    assert found.metadata["iteration"] == 4
    assert set(found.objects) == {"rng_state/shard_0_1", "w._extra_state/shard_0_2"}
    assert {o.kind for o in found.objects.values()} == {"bytes"}
    assert list(found.auxiliary_files) == ["hf/config.json"]
    assert ours(tmp_path / "out") == wanted
    loaded = torch.load(tmp_path / "out/objects/rng_state/shard_0_1.pt", weights_only=True)
    assert loaded == [{"seed": 3}]
    assert torch.load(tmp_path / "out/common.pt", weights_only=True) == common
    assert by_zarr(tmp_path / "out", "module.w").dtype == np.uint16
    attributes = json.loads((tmp_path / "out/module.w/zarr.json").read_text())["attributes"]
    assert attributes == {"megtool_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a", "a"], "two tensors"),
        (["../a"], "path of an array"),
        (["/a"], "path of an array"),
        (["a//b"], "path of an array"),
        (["__x/b"], "path of an array"),
        (["x" * 300], "path of an array"),
        (["a", "a/b"], "inside the array 'a'"),
        (["objects/b"], "reserved by megtool"),
        (["hf"], "reserved by megtool"),
    ],
)
def test_names_that_no_folder_can_have(names, says):
    tensors = [GlobalTensor(name=n, shape=(2,), dtype=dtype("int8")) for n in names]
    with pytest.raises(UsageError, match=says):
        plan_zarr_layout(tensors, kind="zarr")


@pytest.mark.parametrize("chunk", [(2,), (0, 2), (2, 3)])
def test_chunks_that_do_not_fit(chunk):
    t = GlobalTensor(name="a", shape=(4, 4), dtype=dtype("int8"))
    with pytest.raises(UsageError, match="do not fit"):
        plan_zarr_layout([t], kind="zarr", chunks={"a": chunk})
