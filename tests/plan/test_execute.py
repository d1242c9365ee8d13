"""Plans carried out against numpy: any layout to any other, resumed, digested, in any threads."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import DigestError, SourceChangedError, StorageError
from megtool.options.execution import DigestMode
from megtool.plan import execute, work_units
from megtool.plan.copies import Fill, Op, PlanSource
from megtool.plan.planner import build_plan
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue, Extents, ShardOffsets, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards
from tests.support.checkpoints.plan_layouts import LAYOUTS, build_layout, cast_arrays, place
from tests.support.errors import raises


class Job:
    """Canonical tensors of random numbers in a source, and a target they are to reach."""

    def __init__(self, raw, folder, rng, *, there, here, rows, cols, kinds=("float32",) * 2):
        self.raw, self.folder = raw, folder
        names = ["a", "b", "c"][: rng.choice([1, 2, 3])]
        generator = np.random.default_rng(rng.randrange(1 << 30))
        floats = generator.standard_normal((len(names), rows, cols)).astype(np.float32)
        self.kinds = kinds
        self.canonical = {n: cast_arrays(x, kinds[0]) for n, x in zip(names, floats, strict=True)}
        self.wanted = {n: cast_arrays(x, kinds[1], kinds[0]) for n, x in self.canonical.items()}
        at, to = place(there, names, rows, cols), place(here, names, rows, cols)
        self.source = build_layout(raw, folder / "source", rng, at, kinds[0])
        held = {t.name: np.zeros(t.shape, t.dtype.view) for t in self.source.tensors}
        for name, p in at.items():
            raw.put(p, self.canonical[name], held[p.stored])
        raw.write(self.source, held)
        target = build_layout(raw, folder / "tree", rng, to, kinds[1])
        self.reference = {t.name: np.zeros(t.shape, t.dtype.view) for t in target.tensors}
        for name, p in to.items():
            raw.put(p, self.wanted[name], self.reference[p.stored])
        self.plan = build_plan(
            [PlanSource(catalogue=self.source, placements=at)],
            raw.destination(target, small_files={"a/b.json": b"{}"}, final_files={"done": b"1"}),
            to,
        )

    def stage(self, name="out"):
        return open_stage(self.folder / name, files=Files(), fingerprint=self.plan.fingerprint)

    def check(self, root):
        found = self.raw.read(self.plan.target.catalogue, root)
        for name, array in self.reference.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        for file, offset, data in self.plan.target.fragments:
            path = root / self.plan.target.catalogue.files[file].path
            assert path.read_bytes()[offset : offset + len(data)] == data
        assert (root / "a/b.json").read_bytes() == b"{}"
        assert (root / "done").read_bytes() == b"1"

    def check_digests(self, report, *, all_of_them):
        for name, array in self.wanted.items():
            found = report.digests.get(name)
            assert found == crc32c(array.tobytes()) or (found is None and not all_of_them)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder per example."""
    count = iter(range(1 << 30))
    return lambda: tmp_path_factory.mktemp(f"job{next(count)}")


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    there=st.sampled_from(LAYOUTS),
    here=st.sampled_from(LAYOUTS),
    half=st.integers(1, 40),
    cols=st.integers(1, 70),
    kinds=st.sampled_from(
        [
            ("float32", "float32"),
            ("uint8", "uint8"),
            ("bfloat16", "bfloat16"),
            ("int64", "int64"),
            ("float32", "bfloat16"),
            ("bfloat16", "float32"),
            ("float32", "float8_e4m3fn"),
            ("float16", "float32"),
        ]
    ),
    threads=st.sampled_from([1, 3]),
    mode=st.sampled_from(list(DigestMode)),
)
def test_any_layout_reaches_any_other(
    raw, scratch, seed, there, here, half, cols, kinds, threads, mode
):
    rng = random.Random(seed)
    job = Job(raw, scratch(), rng, there=there, here=here, rows=2 * half, cols=cols, kinds=kinds)
    told = []
    with job.stage() as stage:
        report = execute.execute(
            job.plan, stage, files=Files(), threads=threads, digest=mode, progress=told.append
        )
        job.check(stage.tree)
        stage.commit(fsync=False)
    job.check(job.folder / "out")
    payload = sum(t.num_bytes for t in job.plan.target.catalogue.tensors)
    assert sum(report.num_bytes.values()) == payload == sum(told)
    assert set(report.num_bytes) == {Op.COPY if kinds[0] == kinds[1] else Op.CAST}
    if mode is DigestMode.ALL or kinds[0] != kinds[1]:
        assert report.kernel_bytes == 0
    if mode is DigestMode.NONE:
        assert all(report.digests.get(n) is None for n in job.canonical)
    else:
        job.check_digests(report, all_of_them=mode is DigestMode.ALL)


@pytest.mark.parametrize("here", LAYOUTS)
@pytest.mark.parametrize("there", LAYOUTS)
def test_small_tiles_and_units_change_nothing(raw, tmp_path, monkeypatch, there, here):
    monkeypatch.setattr(execute, "TILE_BYTES", 1000)
    monkeypatch.setattr(work_units, "UNIT_BYTES", 3000)
    rng = random.Random(there + here)
    job = Job(raw, tmp_path, rng, there=there, here=here, rows=60, cols=31)
    with job.stage() as stage:
        report = execute.execute(job.plan, stage, files=Files(), threads=2, digest=DigestMode.ALL)
        job.check(stage.tree)
    job.check_digests(report, all_of_them=True)
    with job.stage("again") as stage:
        execute.execute(job.plan, stage, files=Files(), threads=2)
        job.check(stage.tree)


class Stopping(Files):
    """Raises at the n-th call of the system that moves data."""

    def __init__(self, calls, error=KeyboardInterrupt):
        super().__init__()
        self.left, self.error, self.guard = calls, error, threading.Lock()

    def system(self, function, /, *args):
        if function in (os.pwrite, os.copy_file_range, os.preadv):
            with self.guard:
                self.left -= 1
                if self.left == 0:
                    raise self.error
        return super().system(function, *args)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("there", "here"), [("rows", "apart"), ("columns", "turned")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_stopped_run_is_resumed(raw, tmp_path, monkeypatch, threads, there, here, error):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 500)
    job = Job(raw, tmp_path, random.Random(3), there=there, here=here, rows=40, cols=50)
    expected = KeyboardInterrupt if error is KeyboardInterrupt else StorageError
    counting = Stopping(0)
    with job.stage("counted") as stage:
        execute.execute(job.plan, stage, files=counting)
    for share in (0.4, 0.8):
        stopping = Stopping(int(-counting.left * share), error)
        with job.stage() as stage, pytest.raises(expected):
            execute.execute(job.plan, stage, files=stopping, threads=threads)
        assert not (job.folder / "out").exists()
        assert not (stage.tree / "done").exists()
    with job.stage() as stage:
        done = len(stage.resumed)
        assert done
        report = execute.execute(job.plan, stage, files=Files(), threads=threads)
        job.check(stage.tree)
    assert (report.verified, report.repaired) == (done, 0)


@pytest.mark.parametrize(("there", "here"), [("rows", "rows"), ("columns", "woven columns")])
def test_resuming_repairs_what_was_damaged(raw, tmp_path, there, here):
    job = Job(raw, tmp_path, random.Random(5), there=there, here=here, rows=40, cols=50)
    with job.stage() as stage:
        first = execute.execute(job.plan, stage, files=Files())
    with job.stage() as stage:
        assert len(stage.resumed) == first.num_units
        largest = max(job.plan.target.catalogue.files, key=lambda f: f.size)
        path = stage.tree / largest.path
        damaged = bytearray(path.read_bytes())
        damaged[-3] ^= 64
        path.write_bytes(damaged)
        report = execute.execute(job.plan, stage, files=Files(), digest=DigestMode.BUFFERED)
        job.check(stage.tree)
    assert (report.verified, report.repaired) == (first.num_units, 1)
    job.check_digests(report, all_of_them=False)


def test_an_expected_digest_that_does_not_hold_names_the_tensor(raw, tmp_path):
    job = Job(raw, tmp_path, random.Random(1), there="apart", here="rows", rows=8, cols=8)
    right = {n: crc32c(a.tobytes()) for n, a in job.canonical.items()}
    with job.stage() as stage:
        execute.execute(job.plan, stage, files=Files(), digest=DigestMode.ALL, expected=right)
    wrong = right | {"a": right["a"] ^ 1}
    with job.stage("other") as stage, raises(DigestError, tensor="a"):
        execute.execute(job.plan, stage, files=Files(), digest=DigestMode.ALL, expected=wrong)
    assert not (stage.tree / "done").exists()


def test_a_source_that_changes_meanwhile_is_an_error(raw, tmp_path):
    job = Job(raw, tmp_path, random.Random(1), there="apart", here="rows", rows=8, cols=8)
    os.utime(job.source.path(0), ns=(1, 1))
    with job.stage() as stage, pytest.raises(SourceChangedError):
        execute.execute(job.plan, stage, files=Files())
    assert not (stage.tree / "done").exists()


def test_a_truncated_source_is_an_error(raw, tmp_path):
    job = Job(raw, tmp_path, random.Random(1), there="columns", here="rows", rows=8, cols=8)
    for file in job.source.files:
        os.truncate(job.source.root / file.path, 20)
    with job.stage() as stage, pytest.raises(SourceChangedError):
        execute.execute(job.plan, stage, files=Files(), threads=2)


def test_empty_scalar_and_filled_tensors(raw, tmp_path):
    names = ["nothing", "one", "vocab"]
    shapes = [(0, 4), (), (5, 3)]
    kind = dtype("bfloat16")
    given_ = [GlobalTensor(name=n, shape=s, dtype=kind) for n, s in zip(names, shapes, strict=True)]
    source = raw.lay_out(
        tmp_path / "source",
        given_,
        [
            [((0, 0), (0, 4), 0)],
            [((), (), 0)],
            [((0, 0), (2, 3), 0), ((2, 0), (5, 3), 1)],
        ],
    )
    arrays = {
        "nothing": np.zeros((0, 4), "<u2"),
        "one": np.array(7, "<u2"),
        "vocab": np.arange(15, dtype="<u2").reshape(5, 3),
    }
    raw.write(source, arrays)
    wider = [*given_[:2], GlobalTensor(name="vocab", shape=(8, 3), dtype=kind)]
    target = raw.lay_out(
        tmp_path / "tree",
        wider,
        [
            [((0, 0), (0, 4), 0)],
            [((), (), 1)],
            [((0, 0), (4, 3), 0), ((4, 0), (8, 3), 1)],
        ],
    )
    at = {n: Placement.identity(n, s) for n, s in zip(names, shapes, strict=True)}
    plan = build_plan(
        [PlanSource(catalogue=source, placements=at)],
        raw.destination(target),
        at,
        fills=[Fill(stored="vocab", lo=(5, 0), hi=(8, 3), value=1.5)],
    )
    with open_stage(tmp_path / "out", files=Files(), fingerprint=plan.fingerprint) as stage:
        report = execute.execute(plan, stage, files=Files(), digest=DigestMode.ALL)
        found = raw.read(target, stage.tree)
    assert found["one"] == 7
    np.testing.assert_array_equal(found["vocab"][:5], arrays["vocab"])
    assert (found["vocab"][5:] == 0x3FC0).all()  # 1.5 as bfloat16
    assert report.num_bytes == {Op.COPY: 32, Op.FILL: 18}
    for name in names:
        assert report.digests.get(name) == crc32c(arrays[name].tobytes()), name


@pytest.mark.parametrize("mode", list(DigestMode))
def test_a_source_shard_saved_as_a_transposed_view(raw, tmp_path, mode):
    tensor = GlobalTensor(name="x", shape=(300, 200), dtype=dtype("float32"))
    grid = [((0, 0), (100, 200), 0), ((100, 0), (300, 200), 1)]
    source = raw.lay_out(tmp_path / "source", [tensor], [grid])
    array = np.random.default_rng(0).standard_normal(tensor.shape).astype(np.float32)
    raw.write(source, {"x": array})
    turned = bytearray((source.root / "part-1.bin").read_bytes())
    turned[16:] = array[100:].T.tobytes()
    (source.root / "part-1.bin").write_bytes(turned)
    source.files[1] = StoredFile.stat(source.root, "part-1.bin")
    offset = source.extents.offset
    source.extents = replace(source.extents, contained=True)
    source.locate_contained = lambda shards: ShardOffsets(
        offset=offset[shards], strides={i: (1, 200) for i, s in enumerate(shards) if s == 1}
    )
    at = {"x": Placement.identity("x", tensor.shape)}
    target = raw.lay_out(tmp_path / "tree", [tensor], [[((0, 0), (300, 200), 0)]])
    plan = build_plan([PlanSource(catalogue=source, placements=at)], raw.destination(target), at)
    for verified in (0, 1):
        with open_stage(tmp_path / "out", files=Files(), fingerprint=plan.fingerprint) as stage:
            report = execute.execute(plan, stage, files=Files(), digest=mode)
            np.testing.assert_array_equal(raw.read(target, stage.tree)["x"], array)
        assert (report.verified, report.repaired) == (verified, 0)


def test_packed_rows_are_decoded_and_cast(raw, tmp_path):
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((48, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(values, kind)
    (tmp_path / "x").write_bytes(packed.tobytes())
    source = Catalogue(
        format="gguf",
        root=tmp_path,
        files=[StoredFile.stat(tmp_path, "x")],
        tensors=[
            GlobalTensor(name="x", shape=(48, 256), dtype=dtype("float32"), packing="gguf:Q8_0")
        ],
        shards=Shards.build([(0, (0, 0), (48, 256), 0)], 2),
        extents=Extents(
            file=np.zeros(1, np.int32), offset=np.zeros(1, int), length=np.array([packed.nbytes])
        ),
    )
    rope = Placement(  # pairs of rows, as GGUF interleaves the halves of every head
        canonical="x",
        stored="x",
        shape=(4, 2, 6, 256),
        dims=(0, 0, 0, 1),
        mults=(12, 1, 2, 1),
        base=(0, 0),
    )
    tensor = GlobalTensor(name="x", shape=(48, 256), dtype=dtype("bfloat16"))
    target = raw.lay_out(
        tmp_path / "tree", [tensor], [[((0, 0), (48, 100), 0), ((0, 100), (48, 256), 1)]]
    )
    plan = build_plan(
        [PlanSource(catalogue=source, placements={"x": rope})],
        raw.destination(target),
        {"x": Placement.identity("x", (48, 256))},
    )
    with open_stage(tmp_path / "out", files=Files(), fingerprint=plan.fingerprint) as stage:
        report = execute.execute(plan, stage, files=Files(), memory_bytes=1 << 16)
        found = raw.read(target, stage.tree)["x"]
    plain = gguf.quants.dequantize(packed, kind).reshape(4, 6, 2, 256).transpose(0, 2, 1, 3)
    want = cast_arrays(np.ascontiguousarray(plain).reshape(48, 256), "bfloat16")
    np.testing.assert_array_equal(found, want)
    assert report.num_bytes == {Op.DECODE: want.nbytes}
    assert report.digests.get("x") == crc32c(want.tobytes())


def test_memory_stays_within_what_was_allowed(raw, tmp_path):
    job = Job(raw, tmp_path, random.Random(2), there="turned", here="apart", rows=1200, cols=900)
    with job.stage() as stage:
        report = execute.execute(job.plan, stage, files=Files(), threads=2, memory_bytes=1 << 20)
        job.check(stage.tree)
    assert 0 < report.peak_buffer_bytes <= 1 << 20
