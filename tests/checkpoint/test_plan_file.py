"""Plan files: loaded plans equal saved ones, and damaged files are refused."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from megtool.checkpoint import copy, plan_file, planner
from megtool.checkpoint.catalogue import Catalogue, Located, Replica, StoredObject
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.plan import Dropped, Fill, Plan, Source
from megtool.checkpoint.plan_summary import summarize
from megtool.checkpoint.storage.files import Files
from megtool.dtypes import dtype
from megtool.errors import FormatError, SourceChangedError, StorageError
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

SHAPES = {"w": (6, 4), "b\udc80ü": (5,), "s": (), "none": (0, 3)}


def arrays() -> dict[str, np.ndarray]:
    """Small whole numbers, which bf16 holds exactly."""
    return {
        n: (np.arange(math.prod(s), dtype="f4") + k).reshape(s)
        for k, (n, s) in enumerate(SHAPES.items())
    }


@pytest.fixture
def plan(raw, tmp_path) -> Plan:
    """Two tensors, one padded and cast, a scalar and an empty one, cut at random."""
    rng = random.Random(0)
    tensors = [GlobalTensor(name=n, shape=s, dtype=dtype("fp32")) for n, s in SHAPES.items()]
    padded = [dataclasses.replace(t, dtype=dtype("bf16")) for t in tensors]
    padded[0] = dataclasses.replace(padded[0], shape=(8, 4))
    sides = [
        raw.lay_out(tmp_path / name, side, [raw.random_grid(rng, t.shape, 2) for t in side])
        for name, side in (("a", tensors), ("b", padded))
    ]
    raw.write(sides[0], arrays())
    sides[0].objects = {
        "args": StoredObject(name="args", kind="pickle", value={"tp": 2, 3: (b"x", [None, 1.5])}),
        "inert": StoredObject(name="inert", kind="pickle", extent=(0, 0, 4), value=object()),
    }
    sides[0].metadata = {"iteration": 3, "config": {"a": [1, {"b": None}]}, "odd": {object()}}
    sides[0].attachments = {"tokenizer.json": tmp_path / "tokenizer.json"}
    sides[0].replicas = [Replica(shard=0, file=1, offset=2, length=3)]
    sides[0].warnings = ["careful"]
    same = {n: Placement.identity(n, s) for n, s in SHAPES.items()}
    return planner.build(
        [Source(catalogue=sides[0], placements=same)],
        raw.destination(sides[1], small={"z": b"\0\1", "index": b""}, last={"done": b"2"}),
        same,
        fills=[Fill(stored="w", lo=(6, 0), hi=(8, 4), value=float("-inf"))],
        dropped=[Dropped(name="inert", reason="no tensor", num_bytes=4)],
    )


def same_arrays(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and (a == b).all()


def assert_same_catalogue(a: Catalogue, b: Catalogue) -> None:
    for field in ("format", "root", "files", "tensors", "attachments", "replicas", "warnings"):
        assert getattr(a, field) == getattr(b, field), field
    assert a.extents.contained == b.extents.contained
    for x, y in (
        (a.shards.tensor, b.shards.tensor),
        (a.shards.owner, b.shards.owner),
        (a.shards.boxes.lo, b.shards.boxes.lo),
        (a.shards.boxes.hi, b.shards.boxes.hi),
        (a.extents.file, b.extents.file),
        (a.extents.offset, b.extents.offset),
        (a.extents.length, b.extents.length),
    ):
        assert same_arrays(x, y)


def assert_same(a: Plan, b: Plan) -> None:
    for x, y in zip(
        (*a.sources, a.target.catalogue), (*b.sources, b.target.catalogue), strict=True
    ):
        assert_same_catalogue(x, y)
    assert a.target.fragments == b.target.fragments
    assert list(a.target.small.items()) == list(b.target.small.items())
    assert list(a.target.last.items()) == list(b.target.last.items())
    assert (a.entries, a.dropped, a.fingerprint) == (b.entries, b.dropped, b.fingerprint)
    for x, y in (
        (a.source_pieces, b.source_pieces),
        (a.target_pieces, b.target_pieces),
        (a.steps, b.steps),
    ):
        assert same_arrays(x.boxes.lo, y.boxes.lo)
        assert same_arrays(x.boxes.hi, y.boxes.hi)
        for field in dataclasses.fields(x):
            if field.name != "boxes":
                assert same_arrays(getattr(x, field.name), getattr(y, field.name))


def test_a_loaded_plan_is_the_saved_one(plan, tmp_path):
    path = tmp_path / "plan.npz"
    plan_file.save(plan, path)
    again = plan_file.load(path)
    assert_same(plan, again)
    assert planner._fingerprint(again, "") == plan.fingerprint
    assert again.step_runs()[0].tolist() == plan.step_runs()[0].tolist()
    source = again.sources[0]
    assert source.objects["args"] == plan.sources[0].objects["args"]
    assert source.objects["inert"] == dataclasses.replace(
        plan.sources[0].objects["inert"], value=None
    )
    assert source.metadata == {"iteration": 3, "config": {"a": [1, {"b": None}]}}
    source.check_unchanged()
    plan_file.save(again, path)
    assert_same(plan, plan_file.load(path))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["plan.npz"]


def test_a_plan_file_is_an_npz_of_numbers(plan, tmp_path):
    plan_file.save(plan, tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as columns:
        assert {columns[name].dtype.kind for name in columns} <= set("iuf")


def test_an_empty_plan_is_kept(raw, tmp_path):
    empty = raw.lay_out(Path("e"), [], [])
    plan = planner.build([], raw.destination(empty), {})
    plan_file.save(plan, tmp_path / "p")
    assert_same(plan, plan_file.load(tmp_path / "p"))


def test_every_flipped_bit_and_every_cut_is_noticed(plan, tmp_path):
    path = tmp_path / "plan.npz"
    plan_file.save(plan, path)
    good = path.read_bytes()
    rng = random.Random(0)
    damaged = [good[: rng.randrange(len(good))] for _ in range(20)]
    for _ in range(60):
        at, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
        damaged.append(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
    damaged += [b"", b"PK", b"x" * 300, good + b"0"]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(FormatError) as e:
            plan_file.load(path)
        assert e.value.file == str(path)
    with pytest.raises(FormatError, match="No such file"):
        plan_file.load(tmp_path / "none")


@pytest.mark.parametrize("missing", ["meta", "steps.lo", "views", "c0.facts", "entries"])
def test_a_sealed_file_that_is_no_plan_is_refused(plan, tmp_path, missing):
    path = tmp_path / "plan.npz"
    plan_file.save(plan, path)
    with np.load(path) as columns:
        kept = {name: columns[name] for name in columns if name != missing}
    np.savez(path, **kept)
    with open(path, "r+b") as f:
        plan_file._seal(f)
    with pytest.raises(FormatError, match="not a plan"):
        plan_file.load(path)


def test_another_version_is_refused(plan, tmp_path, monkeypatch):
    plan_file.save(plan, tmp_path / "p")
    monkeypatch.setattr(plan_file, "VERSION", 99)
    with pytest.raises(FormatError, match="version 2"):
        plan_file.load(tmp_path / "p")


def test_a_plan_that_cannot_be_written_says_so(plan, tmp_path):
    with pytest.raises(StorageError, match="cannot write the plan"):
        plan_file.save(plan, tmp_path / "none" / "plan")


@pytest.mark.parametrize(("threads", "digest"), [(1, "buffered"), (3, "all")])
def test_a_loaded_plan_is_executed_as_its_summary_says(raw, plan, tmp_path, threads, digest):
    plan_file.save(plan, tmp_path / "plan.npz")
    again = plan_file.load(tmp_path / "plan.npz")
    said = summarize(again, threads=threads, digest_all=digest == "all")
    files = Files()
    with Stage(tmp_path / "out", files=files, fingerprint=again.fingerprint) as stage:
        report = copy.execute(again, stage, files=files, threads=threads, digest=DigestMode(digest))
        found = raw.read(again.target.catalogue, stage.tree)
    want = {n: (a.view("u4") >> 16).astype("u2") for n, a in arrays().items()}
    want["w"] = np.pad(want["w"], ((0, 2), (0, 0)), constant_values=0xFF80)
    for name, array in want.items():
        assert found[name].tolist() == array.tolist()
    assert sum(report.num_bytes.values()) == said.num_bytes.total
    assert report.kernel_bytes == said.num_bytes.kernel
    assert report.peak_buffer_bytes <= said.peak_buffer_bytes


def contained(catalogue: Catalogue) -> Catalogue:
    """The same, with raw offsets 3 bytes into each extent, to be found out later."""
    extents = dataclasses.replace(catalogue.extents, contained=True)
    return dataclasses.replace(
        catalogue,
        extents=extents,
        locate_contained=lambda rows: Located(offset=extents.offset[rows] + 3),
    )


def test_contained_shards_are_located_through_the_reopened_source(plan, tmp_path):
    """The planned source is a selection, and the reopened one lists its files the other way."""
    whole = contained(plan.sources[0])
    part = whole.select(lambda name: name != "w")
    plan_file.save(dataclasses.replace(plan, sources=(part,)), tmp_path / "p")
    opened = []

    def reopen(root: Path) -> Catalogue:
        opened.append(root)
        extents = dataclasses.replace(whole.extents, file=1 - whole.extents.file)
        return contained(dataclasses.replace(whole, files=whole.files[::-1], extents=extents))

    again = plan_file.load(tmp_path / "p", reopen=reopen).sources[0]
    assert opened == []
    rows = np.arange(len(part.shards))[::-1]
    for _ in range(2):
        assert again.locate(rows).offset.tolist() == part.locate(rows).offset.tolist()
    assert opened == [part.root]
    with pytest.raises(ValueError, match="no way to locate"):
        plan_file.load(tmp_path / "p").sources[0].locate(rows)


def test_a_source_that_changed_is_not_located(plan, tmp_path):
    whole = contained(plan.sources[0])
    plan_file.save(dataclasses.replace(plan, sources=(whole,)), tmp_path / "p")
    moved = contained(whole)
    moved.extents = dataclasses.replace(moved.extents, offset=moved.extents.offset + 1)
    again = plan_file.load(tmp_path / "p", reopen=lambda root: moved).sources[0]
    with pytest.raises(SourceChangedError, match="no longer holds"):
        again.locate(np.arange(1))
    again = plan_file.load(tmp_path / "p", reopen=lambda root: whole).sources[0]
    with open(whole.path(0), "ab") as f:
        f.write(b"more")
    with pytest.raises(SourceChangedError, match="changed"):
        again.locate(np.arange(1))
