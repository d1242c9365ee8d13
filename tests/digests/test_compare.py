"""Comparing tensors cut in different ways, against numpy; replicas; digests on the way."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from megtool.digests.compare import ComparedSource, TensorPair, compare, count_pair_bytes
from megtool.dtypes import dtype
from megtool.formats import open_checkpoint
from megtool.process import threads as work_threads
from megtool.storage.files import Files
from megtool.tensors.catalogue import Replica, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.reading import parallel_scan
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.replicas import pair_replicas


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder per example."""
    return lambda: tmp_path_factory.mktemp("compare")


@given(
    shape=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    seed=st.integers(0, 1 << 20),
    changes=st.integers(0, 5),
    threads=st.integers(1, 3),
    part=st.sampled_from([24, 64, 1 << 20]),
)
def test_what_differs_is_found_however_the_two_are_cut(
    raw, scratch, shape, seed, changes, threads, part
):
    rng, make = random.Random(seed), np.random.default_rng(seed)
    tensor = GlobalTensor(name="x", shape=shape, dtype=dtype("float32"))
    x = make.standard_normal(shape).astype(np.float32)
    y = x.copy()
    for _ in range(changes):
        y.reshape(-1)[rng.randrange(y.size)] = rng.choice([np.nan, 0.5, 7.0])
    halves, root = [], scratch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_scan, "PART_BYTES", part)
        for name, array in (("a", x), ("b", y)):
            grid = raw.random_grid(rng, shape, 2)
            catalogue = raw.lay_out(root / name, [tensor], [grid])
            raw.write(catalogue, {"x": array})
            halves.append(
                ComparedSource(
                    reader=CheckpointReader(catalogue, Files()), sizes={"x": array.nbytes}
                )
            )
        place = Placement.identity("x", shape)
        pair = TensorPair(name="x", a=place, b=place)
        seen = []
        found = compare([pair], *halves, threads=threads, progress=seen.append)
    for half, array in zip(halves, (x, y), strict=True):
        half.reader.close()
        from awscrt.checksums import crc32c

        assert half.digests.get("x") == crc32c(array.tobytes())
    assert sum(seen) == count_pair_bytes(pair, *halves) == x.nbytes
    differs = x.view(np.uint32) != y.view(np.uint32)
    assert set(found) == ({"x"} if differs.any() else set())
    if not differs.any():
        return
    delta = found["x"]
    apart = np.abs(x.astype(float) - y).reshape(-1)
    assert delta.num_differing == differs.sum()
    assert delta.num_nan == np.isnan(y).sum()
    assert delta.first == np.flatnonzero(differs.reshape(-1))[0]
    if not np.isnan(apart[differs.reshape(-1)]).all():
        assert delta.largest_abs == np.nanmax(apart)
        assert delta.abs_index == np.nanargmax(apart)


def test_views_that_do_not_nest_are_read_whole(raw, tmp_path):
    array = np.arange(6, dtype=np.uint8)
    tensor = GlobalTensor(name="x", shape=(6,), dtype=dtype("uint8"))
    whole = [([0], [6], 0)]
    one, other = (raw.lay_out(tmp_path / n, [tensor], [whole]) for n in "ab")
    raw.write(one, {"x": array})
    raw.write(other, {"x": array})
    twos = Placement(canonical="x", stored="x", shape=(3, 2), dims=(0, 0), mults=(2, 1), base=(0,))
    threes = replace(twos, shape=(2, 3), mults=(3, 1))
    with CheckpointReader(one, Files()) as a, CheckpointReader(other, Files()) as b:
        pairs = [TensorPair(name="x", a=twos, b=threes)]
        assert compare(pairs, ComparedSource(reader=a), ComparedSource(reader=b)) == {}


def test_the_first_error_of_a_thread_is_raised():
    def work(job):
        if job == 5:
            raise ValueError(job)

    with pytest.raises(ValueError, match="5"):
        work_threads.run_jobs(range(100), work, threads=3)


@pytest.mark.parametrize("change", [None, 2])
def test_a_replica_inside_a_container_is_compared(tmp_path, change):
    values = {"x": torch.arange(12.0).reshape(3, 4), "y": torch.ones(2)}
    dcp.save(values, checkpoint_id=tmp_path)
    again = values["x"].clone()
    if change is not None:
        again[1, change] += 1
    torch.save(again, tmp_path / "copy")
    catalogue = open_checkpoint(tmp_path)
    catalogue.files.append(StoredFile.stat(tmp_path, "copy"))
    row = catalogue.shards.of(catalogue.index["x"]).start
    size = os.path.getsize(tmp_path / "copy")
    catalogue.replicas.append(
        Replica(shard=row, file=len(catalogue.files) - 1, offset=0, length=size)
    )
    one, other = pair_replicas(catalogue)
    (name,) = (t.name for t in one.tensors)
    assert name.startswith("x [0:3, 0:4] in copy")
    place = Placement.identity(name, (3, 4))
    with CheckpointReader(one, Files()) as a, CheckpointReader(other, Files()) as b:
        found = compare(
            [TensorPair(name=name, a=place, b=place)],
            ComparedSource(reader=a),
            ComparedSource(reader=b),
        )
    assert {n: d.abs_index for n, d in found.items()} == ({} if change is None else {name: 6})
