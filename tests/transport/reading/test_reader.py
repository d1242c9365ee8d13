"""Reading tensors against numpy: stored and canonical, sharded, permuted, contained and packed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue, Extents, ShardOffsets, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards
from megtool.transport.reading.reader import CheckpointReader


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder per example."""
    return lambda: tmp_path_factory.mktemp("read")


@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    seed=st.integers(0, 1 << 20),
    most=st.integers(1, 500),
    kind=st.sampled_from(["float32", "bfloat16", "uint8", "bool", "complex64"]),
)
def test_a_stored_tensor_comes_back(raw, scratch, shape, seed, most, kind):
    rng = random.Random(seed)
    tensor = GlobalTensor(name="x", shape=shape, dtype=dtype(kind))
    catalogue = raw.lay_out(scratch(), [tensor], [raw.random_grid(rng, shape, 2)])
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(tensor.dtype.view)
    raw.write(catalogue, {"x": array})
    with CheckpointReader(catalogue, Files()) as reader:
        view = reader.open_stored("x")
        np.testing.assert_array_equal(view.read(), array)
        assert view.read().dtype == array.dtype
        at = 0
        for first, part in view.tiles(most):
            assert first == at
            np.testing.assert_array_equal(part, array.reshape(-1)[at : at + part.size])
            at += part.size
        assert at == array.size


def test_a_canonical_tensor_out_of_a_fused_one(raw, tmp_path):
    fused = np.arange(24 * 5, dtype="<f4").reshape(24, 5)
    tensor = GlobalTensor(name="qkv", shape=(24, 5), dtype=dtype("float32"))
    grid = [((0, 0), (9, 5), 0), ((9, 0), (24, 3), 1), ((9, 3), (24, 5), 0)]
    catalogue = raw.lay_out(tmp_path, [tensor], [grid])
    raw.write(catalogue, {"qkv": fused})
    key = Placement(
        canonical="k", stored="qkv", shape=(3, 2, 5), dims=(0, 0, 1), mults=(8, 1, 1), base=(4, 0)
    )
    with CheckpointReader(catalogue, Files()) as reader:
        found = reader.open_canonical(key).read()
    np.testing.assert_array_equal(found, fused.reshape(3, 8, 5)[:, 4:6])


def test_shards_found_late_and_saved_as_a_transposed_view(tmp_path):
    array = np.arange(60, dtype="<u2").reshape(6, 10)
    (tmp_path / "a").write_bytes(b"head" + array[:4].tobytes())
    (tmp_path / "b").write_bytes(b"longer head!" + array[4:].T.tobytes())
    asked = []

    def locate(shards):
        asked.append(shards.tolist())
        where = {0: 4, 1: 12}
        strides = {i: (1, 2) for i, s in enumerate(shards.tolist()) if s == 1}
        return ShardOffsets(offset=np.array([where[s] for s in shards.tolist()]), strides=strides)

    catalogue = Catalogue(
        format="raw",
        root=tmp_path,
        files=[StoredFile.stat(tmp_path, n) for n in ("a", "b")],
        tensors=[GlobalTensor(name="x", shape=(6, 10), dtype=dtype("bfloat16"))],
        shards=Shards.build([(0, (0, 0), (4, 10), 0), (0, (4, 0), (6, 10), 1)], 2),
        extents=Extents(
            file=np.array([0, 1], np.int32),
            offset=np.zeros(2, np.int64),
            length=np.array([84, 52]),
            contained=True,
        ),
        locate_contained=locate,
    )
    with CheckpointReader(catalogue, Files()) as reader:
        np.testing.assert_array_equal(reader.open_stored("x").read(), array)
        np.testing.assert_array_equal(reader.open_stored("x").read(), array)
    assert asked == [[0, 1]]


def test_packed_rows_are_decoded(tmp_path):
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((48, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(values, kind)
    (tmp_path / "x").write_bytes(b"12345678" + packed.tobytes())
    catalogue = Catalogue(
        format="gguf",
        root=tmp_path,
        files=[StoredFile.stat(tmp_path, "x")],
        tensors=[
            GlobalTensor(name="x", shape=(48, 256), dtype=dtype("float32"), packing="gguf:Q8_0")
        ],
        shards=Shards.build([(0, (0, 0), (48, 256), 0)], 2),
        extents=Extents(
            file=np.zeros(1, np.int32), offset=np.array([8]), length=np.array([packed.nbytes])
        ),
    )
    want = gguf.quants.dequantize(packed, kind)
    halves = Placement(
        canonical="q",
        stored="x",
        shape=(4, 2, 6, 256),
        dims=(0, 0, 0, 1),
        mults=(12, 1, 2, 1),
        base=(0, 0),
    )
    with CheckpointReader(catalogue, Files()) as reader:
        np.testing.assert_array_equal(reader.open_stored("x").read(), want)
        tiles = [part.copy() for _, part in reader.open_stored("x").tiles(4096)]
        assert len(tiles) > 4
        np.testing.assert_array_equal(np.concatenate(tiles), want.reshape(-1))
        found = reader.open_canonical(halves).read()
    np.testing.assert_array_equal(found, want.reshape(4, 6, 2, 256).transpose(0, 2, 1, 3))
