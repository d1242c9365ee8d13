"""Chunks that expand to more than their size: refused in the memory that a good chunk needs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.digests.crc32c import crc32c
from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.formats.zarr.codecs import Codec, DecodedSize, DecodeError, decode
from tests.support.checkpoints.reads import contents
from tests.support.checkpoints.zarr_bombs import CHUNK_BYTES, READ, zstd_frame
from tests.support.errors import raises
from tests.support.limits import is_within, run_limited

numcodecs = pytest.importorskip("numcodecs")

PART = b"\0" * (16 << 20)
REPEATS = 256  # 4 GiB


def zlib_bomb() -> bytes:
    stream = zlib.compressobj(9)
    begin = stream.compress(b"") + stream.flush(zlib.Z_FULL_FLUSH)
    part = stream.compress(PART) + stream.flush(zlib.Z_FULL_FLUSH)
    return begin + part * REPEATS + stream.flush()


def blosc_bomb() -> bytes:
    return bytes(numcodecs.Blosc(cname="zstd").encode(np.zeros(64 << 20, np.uint8)))


def lz4_bomb(claimed: int | None) -> bytes:
    data = bytearray(numcodecs.LZ4().encode(np.zeros(64 << 20, np.uint8)))
    if claimed is not None:
        data[:4] = claimed.to_bytes(4, "little")
    return bytes(data)


BOMBS = {
    "gzip": lambda: gzip.compress(PART) * REPEATS,
    "zlib": zlib_bomb,
    "bz2": lambda: bz2.compress(PART) * REPEATS,
    "lzma": lambda: lzma.compress(PART) * REPEATS,
    "zstd": lambda: zstd_frame(32768),
    "zstd that claims its size": lambda: zstd_frame(32768, 4 << 30),
    "zstd that claims the size of the chunk": lambda: zstd_frame(32768, CHUNK_BYTES),
    "zstd that claims 2**63": lambda: zstd_frame(1, 1 << 63),
    "zstd frames": lambda: zstd_frame(1, 128 << 10) * 4096,
    "blosc": blosc_bomb,
    "lz4": lambda: lz4_bomb(None),
    "lz4 that claims the size of the chunk": lambda: lz4_bomb(CHUNK_BYTES),
}


def codec_of(case: str, version: int) -> dict[str, Any]:
    name = case.partition(" ")[0]
    settings: dict[str, Any] = {} if name == "lzma" else {"level": 1}
    if name == "blosc":
        settings = {"cname": "zstd", "clevel": 5, "shuffle": 1 if version == 2 else "shuffle"}
        settings |= {"blocksize": 0} | ({"typesize": 4} if version == 3 else {})
    if name == "lz4":
        settings = {"acceleration": 1}
    if version == 2:
        return {"id": name, **settings}
    return {"name": name, "configuration": settings}


def write_array(
    folder: Path, codec: dict[str, Any], chunk: bytes, *, version: int, sharded: bool = False
) -> Path:
    """An array of one chunk of float32, `CHUNK_BYTES` of them, stored as the bytes `chunk`."""
    folder.mkdir(parents=True)
    shape = [CHUNK_BYTES // 4]
    if version == 2:
        metadata: dict[str, Any] = {"zarr_format": 2, "shape": shape, "chunks": shape, "order": "C"}
        metadata |= {"dtype": "<f4", "fill_value": 0, "compressor": codec, "filters": None}
        (folder / ".zarray").write_text(json.dumps(metadata))
        (folder / "0").write_bytes(chunk)
        return folder
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little, codec]
    if sharded:
        index = struct.pack("<QQ", 0, len(chunk))
        chunk += index + crc32c(index).to_bytes(4, "little")
        settings = {
            "chunk_shape": shape,
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": settings}]
    metadata = {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "float32"}
    metadata |= {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": codecs,
    }
    (folder / "zarr.json").write_text(json.dumps(metadata))
    (folder / "c").mkdir()
    (folder / "c/0").write_bytes(chunk)
    return folder


def test_chunks_that_expand_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    folders = []
    for number, (case, make) in enumerate(BOMBS.items()):
        data = make()
        assert len(data) < 8 << 20
        for version, sharded in ((2, False), (3, False), (3, True)):
            folder = tmp_path / f"{number}-{version}-{sharded}"
            codec = codec_of(case, version)
            folders.append(write_array(folder, codec, data, version=version, sharded=sharded))
    done = run_limited(["-c", READ, *folders], timeout=60)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == len(folders)
    assert [line for line in lines if not line.startswith("refused")] == []
    assert done.peak_bytes < 300 << 20
    assert is_within(done.seconds, 20, time.monotonic)


def good_chunk(name: str) -> tuple[bytes, bytes]:
    """Raw bytes of a chunk and what a codec makes of them."""
    raw = np.random.default_rng(0).integers(0, 9, CHUNK_BYTES, np.uint8).tobytes()
    settings = {"clevel": 1, "shuffle": 1} if name == "blosc" else {}
    return raw, bytes(
        numcodecs.get_codec({"id": name, **settings}).encode(np.frombuffer(raw, "<f4"))
    )


@pytest.mark.parametrize("name", ["gzip", "zlib", "bz2", "lzma", "zstd", "blosc", "lz4"])
def test_a_chunk_has_its_own_size_exactly(name: str) -> None:
    raw, stored = good_chunk(name)
    data, codec = np.frombuffer(stored, np.uint8), Codec(name, {})
    assert decode(codec, data, DecodedSize(len(raw), True)).tobytes() == raw
    assert decode(codec, data, DecodedSize(len(raw) + 99, False)).tobytes() == raw
    for size in (len(raw) - 1, len(raw) + 1):
        with pytest.raises(DecodeError):
            decode(codec, data, DecodedSize(size, True))
    with pytest.raises(DecodeError):
        decode(codec, data, DecodedSize(len(raw) - 1, False))
    for cut in (0, 1, 7, len(stored) // 2, len(stored) - 1):
        with pytest.raises(DecodeError):
            decode(codec, data[:cut], DecodedSize(len(raw), True))


@pytest.mark.parametrize("name", ["adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"])
def test_a_wrong_checksum_is_refused(name: str) -> None:
    raw, stored = good_chunk(name)
    size = DecodedSize(len(raw), True)
    assert decode(Codec(name, {}), np.frombuffer(stored, np.uint8), size).tobytes() == raw
    for bad in (stored[:9] + bytes([stored[9] ^ 1]) + stored[10:], stored[:3], stored + b"\0" * 4):
        with pytest.raises(DecodeError):
            decode(Codec(name, {}), np.frombuffer(bad, np.uint8), size)


def test_several_frames_and_members_are_one_chunk() -> None:
    half = b"\5" * (CHUNK_BYTES // 2)
    size = DecodedSize(CHUNK_BYTES, True)
    zstd = bytes(numcodecs.Zstd().encode(half))
    skipped = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    for name, stored in {
        "gzip": gzip.compress(half) * 2 + b"\0" * 5,
        "bz2": bz2.compress(half) * 2,
        "lzma": lzma.compress(half) * 2,
        "zstd": zstd + skipped + zstd,
    }.items():
        assert decode(Codec(name, {}), np.frombuffer(stored, np.uint8), size).tobytes() == half * 2


WRONG = {
    "level list": ("zstd", {"level": [3]}, "level"),
    "level text": ("gzip", {"level": "9"}, "level"),
    "level bool": ("zlib", {"level": True}, "level"),
    "level huge": ("zstd", {"level": 1 << 70}, "level"),
    "checksum": ("zstd", {"level": 1, "checksum": {}}, "checksum"),
    "cname": ("blosc", {"cname": 5}, "cname"),
    "typesize": ("blosc", {"typesize": "4"}, "typesize"),
    "element size": ("shuffle", {"elementsize": 0}, "elementsize"),
    "element size list": ("shuffle", {"elementsize": [4]}, "elementsize"),
    "location": ("crc32", {"location": "middle"}, "location"),
    "dtype": ("delta", {"dtype": "O"}, "dtype"),
    "dtype list": ("delta", {"dtype": ["<f4"]}, "dtype"),
    "dtype missing": ("delta", {}, "dtype"),
    "astype": ("delta", {"dtype": "<f4", "astype": "|S4"}, "astype"),
    "filters": ("lzma", {"format": 3, "filters": [3]}, "filters"),
    "dictionary": ("lzma", {"format": 3, "filters": [{"id": 33, "dict_size": 1 << 32}]}, "filters"),
    "format": ("lzma", {"format": 9}, "format"),
    "prefix": ("jenkins_lookup3", {"prefix": "x"}, "prefix"),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", WRONG)
def test_a_setting_of_a_wrong_type_is_named(tmp_path: Path, case: str, version: int) -> None:
    name, settings, wrong = WRONG[case]
    codec = {"id": name, **settings}
    if version == 3:
        codec = {"name": f"numcodecs.{name}", "configuration": settings}
    folder = write_array(tmp_path / "a", codec, b"", version=version)
    with raises(FormatError, name, wrong, file=".zarray" if version == 2 else "zarr.json"):
        open_checkpoint(folder)


SHARDED = "sharding_indexed"
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


def shard_codec(**changes: Any) -> dict[str, Any]:
    settings = {"chunk_shape": [64], "codecs": [LITTLE], "index_codecs": [LITTLE]}
    return {"name": SHARDED, "configuration": settings | changes}


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "transpose", "configuration": {"order": [3]}},
        {"name": "transpose", "configuration": {"order": ["0"]}},
        {"name": "transpose", "configuration": {}},
        LITTLE,
        shard_codec(chunk_shape=["64"]),
        shard_codec(codecs={}),
        shard_codec(codecs=[shard_codec()]),
        shard_codec(index_codecs=[LITTLE, {"name": "gzip", "configuration": {"level": 1}}]),
        shard_codec(index_location=["end"]),
        {"name": "bytes", "configuration": {"endian": 5}},
    ],
)
def test_codecs_that_make_no_sense_are_refused(tmp_path: Path, codec: dict[str, Any]) -> None:
    folder = write_array(tmp_path / "a", codec, b"", version=3)
    with raises(FormatError, file="zarr.json"):
        open_checkpoint(folder)


def test_shards_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", LITTLE, b"", version=3)
    codec = LITTLE
    for _ in range(40):
        codec = shard_codec(codecs=[codec], chunk_shape=[CHUNK_BYTES // 4])
    metadata = json.loads((folder / "zarr.json").read_text())
    (folder / "zarr.json").write_text(json.dumps(metadata | {"codecs": [codec]}))
    with raises(FormatError, "nested", file="zarr.json"):
        open_checkpoint(folder)


def test_a_chunk_far_larger_than_its_array_is_refused(tmp_path: Path) -> None:
    codec = {"id": "zstd", "level": 1}
    folder = write_array(tmp_path / "a", codec, zstd_frame(8192, 1 << 30), version=2)
    metadata = json.loads((folder / ".zarray").read_text())
    text = json.dumps(metadata | {"shape": [4], "chunks": [1 << 28]})
    (folder / ".zarray").write_text(text)
    with raises(FormatError, f"{1 << 30:,}", file="a"):
        open_checkpoint(folder)


def test_a_chunk_file_larger_than_any_encoding_is_not_read(tmp_path: Path) -> None:
    folder = write_array(tmp_path / "a", {"id": "zlib", "level": 1}, b"", version=2)
    with (folder / "0").open("r+b") as file:
        file.truncate(1 << 40)
    done = run_limited(["-c", READ, folder])
    assert done.out.startswith("refused"), done.err
    assert done.peak_bytes < 300 << 20


def test_good_arrays_of_every_kind_are_read(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    data = np.arange(5 * 7 * 3, dtype=">i4").reshape(5, 7, 3)
    how: dict[str, Any] = {"shape": data.shape, "dtype": "i4"}
    from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec

    def sharding(*codecs: Any, **settings: Any) -> Any:
        return ShardingCodec(chunk_shape=(2, 1, 1), codecs=codecs, **settings)

    plain, big = BytesCodec(), BytesCodec(endian="big")
    for number, codecs in enumerate(
        [
            [TransposeCodec(order=(2, 0, 1)), big, GzipCodec()],
            [TransposeCodec(order=(1, 0, 2)), sharding(plain, GzipCodec())],
            [sharding(big, index_codecs=[big, Crc32cCodec()], index_location="start")],
            [sharding(plain), GzipCodec()],
            [ShardingCodec(chunk_shape=(4, 2, 3), codecs=[sharding(plain, GzipCodec())])],
            [sharding(TransposeCodec(order=(0, 2, 1)), plain, Crc32cCodec(), GzipCodec())],
        ]
    ):
        array = zarr.Array.create(
            tmp_path / str(number), chunk_shape=(4, 4, 3), codecs=codecs, zarr_format=3, **how
        )
        array[:4] = data[:4]
        expected = np.zeros(data.shape, "<i4")
        expected[:4] = data[:4]
        (stored,) = contents(open_checkpoint(tmp_path / str(number))).values()
        assert stored.tobytes() == expected.tobytes(), codecs
    filters = [numcodecs.Delta(">i4", ">i8"), numcodecs.Shuffle(8), numcodecs.CRC32()]
    array = zarr.create_array(
        tmp_path / "v2",
        chunks=(4, 4, 3),
        zarr_format=2,
        order="F",
        filters=filters,
        compressors=numcodecs.LZMA(),
        shape=data.shape,
        dtype=">i4",
    )
    array[:] = data
    (stored,) = contents(open_checkpoint(tmp_path / "v2")).values()
    assert stored.tobytes() == data.astype("<i4").tobytes()
    assert sys.byteorder == "little"
