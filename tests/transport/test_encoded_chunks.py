"""Cells on their way: encoded and edge chunks of zarr reach any layout, digested and resumed."""

import random

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.formats import open_checkpoint
from megtool.options.execution import DigestMode
from megtool.plan import execute, work_units
from megtool.plan.copies import PlanSource
from megtool.plan.planner import build_plan
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport import encoded_chunks
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.rechunk import Rechunking, rechunk

zarr = pytest.importorskip("zarr")

LAYOUTS = {
    "raw": {"chunks": (48, 40), "compressors": None},
    "packed": {"chunks": (48, 40)},
    "sharded": {"chunks": (24, 40), "shards": (48, 120), "compressors": None},
    "both": {"chunks": (24, 40), "shards": (48, 120)},
    "rows": {"chunks": (64, 300), "compressors": None},
}


@pytest.fixture
def saved(tmp_path):
    """Arrays of one shape in every layout, one of them half empty; and what they hold."""
    group = zarr.open_group(tmp_path / "source", mode="w", zarr_format=3)
    rng = np.random.default_rng(1)
    wanted = {}
    for name, how in LAYOUTS.items():
        wanted[name] = rng.standard_normal((200, 300)).astype(np.float32)
        wanted[name][100:, 130:] = 0
        array = group.create_array(name, shape=(200, 300), dtype="float32", fill_value=0, **how)
        array[:] = wanted[name]
    assert not (tmp_path / "source/packed/c/4/4").exists()
    return tmp_path / "source", wanted


def plan(raw, root, rng, *, turned=False, kind="float32"):
    source = open_checkpoint(root)
    tensors, to = [], {}
    for t in source.tensors:
        shape = t.shape[::-1] if turned else t.shape
        tensors.append(GlobalTensor(name=t.name, shape=shape, dtype=dtype(kind)))
        dims = (1, 0) if turned else (0, 1)
        to[t.name] = Placement(
            canonical=t.name, stored=t.name, shape=t.shape, dims=dims, mults=(1, 1), base=(0, 0)
        )
    target = raw.lay_out(
        root, tensors, [raw.random_grid(rng, t.shape, 3) for t in tensors], align=8
    )
    places = {t.name: Placement.identity(t.name, t.shape) for t in source.tensors}
    return build_plan(
        [PlanSource(catalogue=source, placements=places)], raw.destination(target), to
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("mode", list(DigestMode))
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_reach_any_layout(raw, tmp_path, monkeypatch, saved, turned, mode, threads):
    root, wanted = saved
    monkeypatch.setattr(work_units, "UNIT_BYTES", 50_000)
    monkeypatch.setattr(encoded_chunks, "CACHE_BYTES", 1 << 16)
    job = plan(raw, root, random.Random(threads), turned=turned)
    with open_stage(tmp_path / "out", files=Files(), fingerprint=job.fingerprint) as stage:
        report = execute.execute(
            job, stage, files=Files(), threads=threads, memory_bytes=1 << 20, digest=mode
        )
        stage.commit(fsync=False)
    found = raw.read(job.target.catalogue, tmp_path / "out")
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array.T if turned else array)
    if mode is DigestMode.ALL:
        assert report.digests.complete().keys() == wanted.keys()


def test_a_stopped_run_is_resumed(raw, tmp_path, monkeypatch, saved):
    root, wanted = saved
    monkeypatch.setattr(work_units, "UNIT_BYTES", 50_000)
    job = plan(raw, root, random.Random(3), kind="float64")
    count = iter(range(4))

    def stop(num_bytes):
        if next(count, None) is None:
            raise KeyboardInterrupt

    def run(progress=None):
        with open_stage(tmp_path / "out", files=Files(), fingerprint=job.fingerprint) as stage:
            report = execute.execute(job, stage, files=Files(), progress=progress)
            stage.commit(fsync=False)
        return report

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    assert run().verified > 0
    found = raw.read(job.target.catalogue, tmp_path / "out")
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_regrouped_cell_is_read_at_its_start(saved):
    root, wanted = saved
    source = open_checkpoint(root).select(lambda name: name == "packed")
    rows = np.flatnonzero(source.shards.boxes.shape.prod(axis=1) == 48 * 40)[:3]
    lo = np.arange(3, dtype=np.int64)[:, None] * 900
    tensor = GlobalTensor(name="flat", shape=(2700,), dtype=dtype("float32"))
    pieces = Rechunking(
        tensors=[tensor],
        tensor=np.zeros(3, np.int64),
        boxes=Boxes(lo, lo + 900),
        shard=rows,
        start=np.array([0, 7, 1000], np.int64),
        copies=np.zeros(3, bool),
    )
    found = rechunk(source, lambda name: False, pieces)
    found.check()
    with CheckpointReader(found, Files()) as reader:
        flat = reader.open_stored("flat").read()
    for k, start in enumerate((0, 7, 1000)):
        box = source.shards.boxes[rows[k : k + 1]]
        where = tuple(slice(*p) for p in zip(box.lo[0], box.hi[0], strict=True))
        chunk = wanted["packed"][where].reshape(-1)
        np.testing.assert_array_equal(flat[k * 900 : k * 900 + 900], chunk[start : start + 900])


@pytest.mark.parametrize("mode", [DigestMode.NONE, DigestMode.ALL])
def test_long_runs_of_cells_are_copied_by_the_kernel(raw, tmp_path, mode):
    wanted = np.random.default_rng(2).standard_normal(1 << 16)
    how = {"shape": wanted.shape, "chunks": (30000,), "dtype": "float64"}
    zarr.create_array(tmp_path / "t", **how)[:] = wanted
    source = open_checkpoint(tmp_path / "t")
    assert source.encoded_chunks.mask.all()
    target = raw.lay_out(tmp_path, source.tensors, [[([0], [1 << 16], 0)]])
    places = {"t": Placement.identity("t", wanted.shape)}
    job = build_plan(
        [PlanSource(catalogue=source, placements=places)], raw.destination(target), places
    )
    with open_stage(tmp_path / "out", files=Files(), fingerprint=job.fingerprint) as stage:
        report = execute.execute(job, stage, files=Files(), digest=mode)
        stage.commit(fsync=False)
    assert report.kernel_bytes == (wanted.nbytes if mode is DigestMode.NONE else 0)
    np.testing.assert_array_equal(raw.read(target, tmp_path / "out")["t"], wanted)
