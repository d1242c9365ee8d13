"""A plan with a cast, padding, a scalar and an empty tensor does what its summary says."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.options.execution import DigestMode
from megtool.plan import execute, planner
from megtool.plan.copies import DroppedItem, Fill, PlanSource, ReshardPlan
from megtool.plan.summary import summarize
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue, Replica, ShardOffsets, StoredObject
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
def plan(raw, tmp_path) -> ReshardPlan:
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
    sides[0].auxiliary_files = {"tokenizer.json": tmp_path / "tokenizer.json"}
    sides[0].replicas = [Replica(shard=0, file=1, offset=2, length=3)]
    sides[0].warnings = ["careful"]
    same = {n: Placement.identity(n, s) for n, s in SHAPES.items()}
    return planner.build_plan(
        [PlanSource(catalogue=sides[0], placements=same)],
        raw.destination(
            sides[1], small_files={"z": b"\0\1", "index": b""}, final_files={"done": b"2"}
        ),
        same,
        fills=[Fill(stored="w", lo=(6, 0), hi=(8, 4), value=float("-inf"))],
        dropped=[DroppedItem(name="inert", reason="no tensor", num_bytes=4)],
    )


@pytest.mark.parametrize(("threads", "digest"), [(1, "buffered"), (3, "all")])
def test_a_plan_is_executed_as_its_summary_says(raw, plan, tmp_path, threads, digest):
    expected = summarize(plan, threads=threads, digest_all=digest == "all")
    files = Files()
    with open_stage(tmp_path / "out", files=files, fingerprint=plan.fingerprint) as stage:
        report = execute.execute(
            plan, stage, files=files, threads=threads, digest=DigestMode(digest)
        )
        found = raw.read(plan.target.catalogue, stage.tree)
    want = {n: (a.view("u4") >> 16).astype("u2") for n, a in arrays().items()}
    want["w"] = np.pad(want["w"], ((0, 2), (0, 0)), constant_values=0xFF80)
    for name, array in want.items():
        assert found[name].tolist() == array.tolist()
    assert sum(report.num_bytes.values()) == expected.num_bytes.total
    assert report.kernel_bytes == expected.num_bytes.kernel
    assert report.peak_buffer_bytes <= expected.peak_buffer_bytes


def contained(catalogue: Catalogue) -> Catalogue:
    """The same, with raw offsets 3 bytes into each extent, to be found out later."""
    extents = dataclasses.replace(catalogue.extents, contained=True)
    return dataclasses.replace(
        catalogue,
        extents=extents,
        locate_contained=lambda rows: ShardOffsets(offset=extents.offset[rows] + 3),
    )


def test_contained_shards_are_located_through_the_catalogue(plan):
    """A selection finds its shards in the catalogue it was selected from."""
    source = contained(plan.sources[0])
    part = source.select(lambda name: name != "w")
    names = [part.tensors[number].name for number in part.shards.tensor.tolist()]
    rows = [
        row
        for row, number in enumerate(source.shards.tensor.tolist())
        if source.tensors[number].name in names
    ]
    located = part.locate(np.arange(len(part.shards))[::-1])
    assert located.offset.tolist() == (source.extents.offset[rows[::-1]] + 3).tolist()
    part.locate_contained = None
    with pytest.raises(ValueError, match="no way to locate"):
        part.locate(np.arange(1))
