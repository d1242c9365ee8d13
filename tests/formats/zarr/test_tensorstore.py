"""What tensorstore wrote: zarr v2 and v3 with its own types, and OCDBT databases."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.errors import CheckpointError, FormatError
from megtool.formats import detect_format, open_checkpoint
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises

ts = pytest.importorskip("tensorstore")

KINDS = ("bfloat16", "float32", "int64", "bool", "float8_e4m3fn", "float8_e5m2", "uint16")


def numbers(shape, kind, seed=0):
    size = int(np.prod(shape, dtype=int))
    found = np.random.default_rng(seed).integers(0, 2 if kind == "bool" else 100, size)
    name = getattr(ml_dtypes, kind, None) or kind
    return found.astype(np.dtype(name)).reshape(shape)


def read(root):
    found = open_checkpoint(root)
    with CheckpointReader(found, Files()) as reader:
        return {t.name: (t.dtype.name, reader.open_stored(t.name).read()) for t in found.tensors}


def check(root, wanted):
    held = read(root)
    assert held.keys() == wanted.keys()
    for name, array in wanted.items():
        kind, found = held[name]
        assert (kind, found.shape) == (array.dtype.name, array.shape)
        assert found.tobytes() == array.tobytes(), name


def save(driver, kvstore, array, **metadata):
    spec = {"driver": driver, "kvstore": kvstore, "metadata": metadata}
    how = {"create": True, "dtype": array.dtype, "shape": array.shape}
    ts.open(spec, **how).result().write(array).result()


def codecs(draw, driver):
    if driver == "zarr":
        one = [None, {"id": "zstd", "level": 1}, {"id": "blosc"}, {"id": "gzip", "level": 1}]
        return {"compressor": draw(st.sampled_from(one))}
    endian = draw(st.sampled_from(["little", "big"]))
    more = [[], [{"name": "zstd"}], [{"name": "blosc"}], [{"name": "gzip"}], [{"name": "crc32c"}]]
    return {
        "codecs": [
            {"name": "bytes", "configuration": {"endian": endian}},
            *draw(st.sampled_from(more)),
        ]
    }


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_tensorstore_writes_is_read(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("ts") / "ckpt"
    root.mkdir()
    database = data.draw(st.booleans(), "database")
    (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    if database:
        (root / "zarr.json").unlink()
    wanted = {}
    for k in range(data.draw(st.integers(1, 3), "arrays")):
        driver = data.draw(st.sampled_from(["zarr", "zarr3"]))
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3), "shape"))
        chunk = [data.draw(st.integers(1, 4)) for _ in shape]
        array = numbers(shape, data.draw(st.sampled_from(KINDS)), k)
        name = f"layer.{k}/w" if k else "t"
        metadata = codecs(data.draw, driver)
        if driver == "zarr":
            metadata["chunks"] = chunk
        else:
            if data.draw(st.booleans(), "sharded"):
                at = data.draw(st.sampled_from(["start", "end"]))
                inner = {"chunk_shape": chunk, "index_location": at, **metadata}
                metadata = {"codecs": [{"name": "sharding_indexed", "configuration": inner}]}
                chunk = [c * data.draw(st.integers(1, 3)) for c in chunk]
            grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
            metadata["chunk_grid"] = grid
        base = {"driver": "file", "path": f"{root}/"}
        kvstore = {"driver": "ocdbt", "base": base} if database else dict(base)
        kvstore["path"] = f"{name}/" if database else f"{root}/{name}/"
        save(driver, kvstore, array, **metadata)
        wanted[name] = array
    check(root, wanted)
    assert "tensorstore" in detect_format(root).names


@pytest.mark.parametrize("shape", [(), (5,), (5, 7, 2)])
@pytest.mark.parametrize("at", ["start", "end"])
def test_raw_shards_are_read_by_their_index(tmp_path, shape, at):
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    inner = {"chunk_shape": [2] * len(shape), "index_location": at, "codecs": [little]}
    array = numbers(shape, "bfloat16")
    save(
        "zarr3",
        {"driver": "file", "path": str(tmp_path / "a")},
        array,
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [4] * len(shape)}},
        codecs=[{"name": "sharding_indexed", "configuration": inner}],
    )
    found = open_checkpoint(tmp_path / "a")
    assert found.encoded_chunks is None or not array.all()
    check(tmp_path / "a", {"a": array})


def test_formats_are_told_apart(tmp_path):
    for name, kind, wanted in (("a", "bfloat16", "tensorstore"), ("b", "float32", "zarr")):
        store = {"driver": "file", "path": str(tmp_path / name)}
        save("zarr3", store, numbers((4, 4), kind))
        assert open_checkpoint(tmp_path / name).format == wanted
        check(tmp_path / name, {name: numbers((4, 4), kind)})


@pytest.fixture
def database(tmp_path):
    root = tmp_path / "db"
    for name in ("params.a", "params.b"):
        store = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
        save("zarr", store, numbers((20, 30), "bfloat16"), chunks=[8, 8])
    return root


def test_a_database(database):
    found = open_checkpoint(database)
    assert found.format == "ocdbt"
    assert found.encoded_chunks.mask.all()
    check(database, dict.fromkeys(["params.a", "params.b"], numbers((20, 30), "bfloat16")))


def test_a_damaged_database(database, tmp_path):
    manifest = database / "manifest.ocdbt"
    good = manifest.read_bytes()
    for bad in (b"", good[:10], good[:-1] + b"\0", bytes(100)):
        manifest.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read(database)
    manifest.write_bytes(good)
    for file in (database / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(FormatError):
        read(database)


def test_a_database_without_arrays(tmp_path):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/db/"}).result()
    store.write("notes", b"hello").result()
    with raises(FormatError, id="not-a-checkpoint"):
        open_checkpoint(tmp_path / "db")
