"""Databases whose nodes expand to gigabytes: refused, without their memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from megtool.digests.crc32c import crc32c
from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from tests.support.checkpoints.reads import contents
from tests.support.checkpoints.zarr_bombs import CHUNK_BYTES, READ, zstd_frame
from tests.support.errors import raises
from tests.support.limits import is_within, run_limited

tensorstore = pytest.importorskip("tensorstore")
numcodecs = pytest.importorskip("numcodecs")


def array_metadata(**changes: object) -> bytes:
    shape = [CHUNK_BYTES // 4]
    codecs: list[object] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": codecs,
    }
    return json.dumps(metadata | changes).encode()


def write_database(folder: Path, values: dict[str, bytes], inline: int = 100) -> Path:
    folder.mkdir(parents=True)
    config = {"max_inline_value_bytes": inline}
    spec = {"driver": "ocdbt", "base": f"file://{folder}/", "config": config}
    store = tensorstore.KvStore.open(spec).result()
    transaction = tensorstore.Transaction(atomic=True)
    for key, value in values.items():
        store.with_transaction(transaction).write(key, value)
    transaction.commit_async().result()
    return folder


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def frame(raw: bytes, num_blocks: int, rest: bytes) -> bytes:
    """A zstd frame of `raw`, blocks that each repeat a zero 128 Ki times, and `rest`."""

    def stored(data: bytes, is_last: bool) -> bytes:
        return (len(data) << 3 | is_last).to_bytes(3, "little") + data

    zeros = zstd_frame(num_blocks + 1)[6:-4]
    return b"\x28\xb5\x2f\xfd\x00\x58" + stored(raw, False) + zeros + stored(rest, True)


def split(path: Path) -> tuple[bytes, bytes]:
    """What comes before the compressed part of a node or manifest, and that part, decoded."""
    data = path.read_bytes()
    begin = data.find(b"\x28\xb5\x2f\xfd")
    return data[:begin], bytes(numcodecs.Zstd().decode(data[begin:-4]))


def put(path: Path, begin: bytes, compressed: bytes) -> int:
    size = len(begin) + len(compressed) + 4
    data = begin[:4] + size.to_bytes(8, "little") + begin[12:] + compressed
    path.write_bytes(data + crc32c(data).to_bytes(4, "little"))
    return size


def inflate_node(folder: Path, num_values: int) -> None:
    """Replace the only node of a database by one with `num_values` values of 1 MiB of zeros."""
    (node,) = (folder / "d").iterdir()
    old_size = node.stat().st_size
    begin, _ = split(node)
    keys = [f"k{n:06d}".encode() for n in range(num_values)]
    raw = b"\0\0" + varint(num_values) + b"\0" * (num_values - 1)
    raw += varint(len(keys[0])) * num_values + b"".join(keys) + varint(1 << 20) * num_values
    size = put(node, begin, frame(raw, num_values * 8, b"\0" * num_values))
    begin, content = split(folder / "manifest.ocdbt")
    assert content.count(varint(old_size)) == 2
    content = content.replace(varint(old_size), varint(size))
    put(folder / "manifest.ocdbt", begin, bytes(numcodecs.Zstd().encode(content)))


DIRECTLY = """
import sys, tensorstore
store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{sys.argv[1]}/"}).result()
print(len(store.list().result()))
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    values = {
        "a/zarr.json": array_metadata(),
        "a/c/0": bytes(numcodecs.Zstd().encode(b"\1" * CHUNK_BYTES)),
    }
    return write_database(tmp_path / "db", values)


def test_a_node_that_expands_is_refused(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db", {"a/zarr.json": array_metadata()}, 1 << 20)
    inflate_node(database, 256)  # the forgery itself is sound
    small = run_limited(["-c", DIRECTLY, database])
    assert small.out == "256\n", small.err
    assert small.peak_bytes > 256 << 20
    inflate_node(database, 2048)
    (node,) = (database / "d").iterdir()
    assert node.stat().st_size < 256 << 10
    done = run_limited(["-c", READ, database])
    assert done.out.startswith(f"refused {database} None reading the index"), done.err + done.out
    assert done.peak_bytes < 640 << 20
    assert is_within(done.seconds, 20, time.monotonic)


def test_a_value_that_is_too_large_for_its_chunk_is_refused(tmp_path: Path) -> None:
    values = {"a/zarr.json": array_metadata(), "a/c/0": b"\0" * (1 << 20)}
    catalogue = open_checkpoint(write_database(tmp_path / "db", values))
    with raises(FormatError, "more than", tensor="a"):
        contents(catalogue)


def test_a_value_that_expands_is_refused(tmp_path: Path) -> None:
    values = {"a/zarr.json": array_metadata(), "a/c/0": zstd_frame(4096, 4096 << 17)}
    catalogue = open_checkpoint(write_database(tmp_path / "db", values))
    with raises(FormatError, "cannot be decoded", tensor="a"):
        contents(catalogue)


def test_chunks_and_shards_of_a_good_database_are_read(database: Path, tmp_path: Path) -> None:
    (elements,) = contents(open_checkpoint(database)).values()
    assert elements.tobytes() == b"\1" * CHUNK_BYTES
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/sharded/", "path": "x/"},
        "metadata": {"data_type": "bfloat16", "shape": [6, 8]},
        "schema": {
            "chunk_layout": {"read_chunk": {"shape": [2, 2]}, "write_chunk": {"shape": [4, 4]}}
        },
    }
    data = (np.arange(48) - 20).reshape(6, 8).astype(tensorstore.bfloat16.numpy_dtype)
    stored = tensorstore.open(spec, create=True).result()
    stored[:3, 1:7] = data[:3, 1:7]
    expected = stored.read().result()
    (elements,) = contents(open_checkpoint(tmp_path / "sharded")).values()
    assert elements.tobytes() == expected.tobytes()
    assert expected.any()
