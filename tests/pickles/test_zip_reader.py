"""The zip container of torch.save, against torch itself, and against those who lie in it."""

from __future__ import annotations

import collections
import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import DTYPES, DType, dtype
from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles import zip_reader
from megtool.pickles.zip_tensor import TensorLocation, locate_tensor_item
from megtool.pickles.zip_writer import encode_object, plan_tensor_item, write_archive

Put = Callable[..., tuple[int, int, int]]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write bytes at an offset of a file: `(fd, offset, length)`."""
    fds = []

    def write(data: bytes, offset: int = 77) -> tuple[int, int, int]:
        fd = os.open(tmp_path / f"{len(fds)}.bin", os.O_RDWR | os.O_CREAT)
        fds.append(fd)
        os.pwrite(fd, data, offset)
        os.pwrite(fd, b"after", offset + len(data))
        return fd, offset, len(data)

    yield write
    for fd in fds:
        os.close(fd)


def locate(place: tuple[int, int, int]) -> TensorLocation:
    return locate_tensor_item(*place, file="x", tensor="t", views={})


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(kind: DType, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.randint(0, 2, (int(np.prod(shape)) * kind.itemsize,), dtype=torch.uint8)
    return raw.view(getattr(torch, kind.name)).reshape(shape)


@pytest.mark.parametrize("kind", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3), (40_000,), (300, 70, 2)], ids=str)
def test_torch_and_we_read_each_others_items(kind: DType, shape: tuple[int, ...], put: Put) -> None:
    tensor = some(kind, shape)
    raw = raw_bytes(tensor)
    for at in (0, 77, 4095):
        item = plan_tensor_item(kind, shape, offset=at)
        assert item.length == item.offset + len(raw) + len(item.suffix)
        assert (at + item.offset) % (4096 if len(raw) >= 65536 else 64) == 0
        blob = item.prefix.ljust(item.offset, b"\0") + raw + item.suffix
        loaded = torch.load(io.BytesIO(blob), weights_only=True)
        assert loaded.dtype == tensor.dtype
        assert loaded.shape == tensor.shape
        assert raw_bytes(loaded) == raw
        ours = locate(put(blob, at))
        assert (ours.offset, ours.dtype, ours.shape) == (at + item.offset, kind, shape)
    theirs = put(saved(tensor))
    found = locate(theirs)
    assert (found.dtype, found.shape, found.strides) == (kind, shape, None)
    assert os.pread(theirs[0], len(raw), found.offset) == raw


def test_views_and_parameters_are_located(put: Put) -> None:
    base = torch.arange(60.0).reshape(5, 12)
    for tensor in (base.t(), base[1:3], base[:, 2:5], torch.nn.Parameter(base), base[2, 3]):
        fd, offset, length = put(saved(tensor))
        found = locate((fd, offset, length))
        steps = found.strides or tuple(torch.empty(found.shape).stride())
        array = np.frombuffer(os.pread(fd, length, found.offset)[: 60 * 4], "<f4")
        view = np.lib.stride_tricks.as_strided(array, found.shape, [4 * s for s in steps])
        assert np.array_equal(view, tensor.detach().numpy())


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(2)},
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        "text",
    ],
    ids=["dict", "sparse", "meta", "text"],
)
def test_items_that_hold_no_plain_tensor_are_refused(value: Any, put: Put) -> None:
    with pytest.raises(FormatError):
        locate(put(saved(value)))


def test_an_object_is_read_edited_and_written_again(put: Put) -> None:
    value = {
        "rng": [torch.random.get_rng_state(), np.random.get_state(), random.getstate()],
        "a": collections.OrderedDict(x=torch.arange(4.0), y=torch.zeros(3, dtype=torch.uint16)),
        "iteration": 7,
    }
    tree = zip_reader.load_object(*put(saved(value)), file="x")
    tree["iteration"] = 8
    out = torch.load(io.BytesIO(encode_object(tree)), weights_only=False)
    assert out["iteration"] == 8
    assert torch.equal(out["rng"][0], value["rng"][0])
    assert np.array_equal(out["rng"][1][1], value["rng"][1][1])
    assert out["rng"][2] == value["rng"][2]
    assert torch.equal(out["a"]["x"], value["a"]["x"])
    assert raw_bytes(out["a"]["y"]) == raw_bytes(value["a"]["y"])
    with pytest.raises(ValueError, match="no bytes"):
        encode_object(pickle_reader.PersistentRef(("storage", "x", "0")))


def test_zip_tools_accept_what_we_write() -> None:
    blob = encode_object({"a": [1, 2, "three"]})
    with zipfile.ZipFile(io.BytesIO(blob)) as z:
        assert z.testzip() is None
    assert torch.load(io.BytesIO(blob), weights_only=True) == {"a": [1, 2, "three"]}


def test_sizes_beyond_four_gibibytes_fit(tmp_path: Path) -> None:
    """A hole of 5 GiB: torch finds the tensor, and we do."""
    count = (5 << 30) // 2
    item = plan_tensor_item(dtype("bfloat16"), (count,), offset=0)
    path = tmp_path / "large.pt"
    with path.open("wb") as f:
        f.write(item.prefix)
        f.seek(item.offset + 2 * count - 2)
        f.write(struct.pack("<H", 0x3F80) + item.suffix)
    assert path.stat().st_size == item.length
    with path.open("rb") as f:
        found = locate((f.fileno(), 0, item.length))
    assert (found.offset, found.shape) == (item.offset, (count,))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded[-1] == 1
    assert zipfile.ZipFile(path).getinfo("archive/data/0").file_size == 2 * count


def test_every_truncation_is_an_error(put: Put) -> None:
    blob = saved(torch.arange(5.0))
    fd, _, length = put(blob, 0)
    for end in range(length):
        with pytest.raises(FormatError):
            locate((fd, 0, end))


def test_bytes_after_the_end_are_an_error(put: Put) -> None:
    fd, _, length = put(saved(torch.arange(5.0)), 0)
    with pytest.raises(FormatError):
        locate((fd, 0, length + 5))


def test_a_flipped_bit_never_moves_the_data(put: Put) -> None:
    """Each bit of the headers: either refused, or of no consequence for where and what it is."""
    item = plan_tensor_item(dtype("float32"), (5, 3))
    data = np.arange(15, dtype="<f4").tobytes()
    blob = item.prefix.ljust(item.offset, b"\0") + data + item.suffix
    fd, at, length = put(blob, 0)
    good = locate((fd, at, length))
    same = wrong = 0
    for byte in [*range(item.offset), *range(item.offset + len(data), length)]:
        for bit in range(8):
            os.pwrite(fd, bytes([blob[byte] ^ 1 << bit]), byte)
            try:
                found = locate((fd, at, length))
            except FormatError:
                wrong += 1
            else:
                same += 1
                assert found.dtype.itemsize == 4 or found.dtype != good.dtype
                assert found.offset + 4 * np.prod(found.shape) <= length
        os.pwrite(fd, blob[byte : byte + 1], byte)
    assert wrong > same / 4


def zip_of(
    entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED, **more: Any
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        for name, data in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            for key, value in more.items():
                setattr(info, key, value)
            z.writestr(info, data)
    return out.getvalue()


def with_field(blob: bytes, sign: bytes, at: int, value: bytes, nth: int = 0) -> bytes:
    """The blob with a field of its nth record of some kind replaced."""
    start = -1
    for _ in range(nth + 1):
        start = blob.index(sign, start + 1)
    return blob[: start + at] + value + blob[start + at + len(value) :]


PICKLE = plan_tensor_item(dtype("float32"), (4,)).prefix
_START = PICKLE.index(b"\x80\x02")
MEMBERS = [
    ("a/data.pkl", PICKLE[_START : PICKLE.index(b"PK\3\4", _START)]),
    ("a/data/0", b"0123456789abcdef"),
]
STORED = zip_of(MEMBERS)
OURS = write_archive({name[2:]: data for name, data in MEMBERS})


def test_the_corpus_starts_from_what_is_good(put: Put) -> None:
    assert locate(put(STORED)).shape == (4,)
    assert locate(put(OURS)).shape == (4,)


CENTRAL, LOCAL, END, END64 = b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6"
MALICIOUS = {
    "compressed": zip_of(MEMBERS, zipfile.ZIP_DEFLATED),
    "bzip2": zip_of(MEMBERS, zipfile.ZIP_BZIP2),
    "symlink": zip_of(MEMBERS, create_system=3, external_attr=0o120777 << 16),
    "comment": STORED[:-2] + b"\x03\x00abc",
    "encrypted": with_field(STORED, CENTRAL, 8, b"\1\0"),
    "encrypted locally": with_field(STORED, LOCAL, 6, b"\1\0"),
    "compressed locally": with_field(STORED, LOCAL, 8, b"\x08\0"),
    "another name locally": with_field(STORED, LOCAL, 30, b"b"),
    "another size locally": with_field(STORED, LOCAL, 22, b"\xff"),
    "larger than it is": with_field(STORED, CENTRAL, 24, b"\xff\xff\xff\x7f"),
    "packed otherwise": with_field(STORED, CENTRAL, 20, b"\x01"),
    "overlap": with_field(STORED, CENTRAL, 42, b"\0\0\0\0", nth=1),
    "beyond the region": with_field(STORED, CENTRAL, 42, b"\xff\xff\xff\x7f", nth=1),
    "extra over the data": with_field(STORED, LOCAL, 28, b"\xf0\xff", nth=1),
    "wide without a field": with_field(STORED, CENTRAL, 24, b"\xff\xff\xff\xff"),
    "count": with_field(STORED, END, 8, b"\xff\x00\xff\x00"),
    "counts that differ": with_field(STORED, END, 8, b"\x01"),
    "directory outside": with_field(STORED, END, 16, b"\xff\xff\xff\x7f"),
    "another disk": with_field(STORED, END, 4, b"\1"),
    "zip64 count": with_field(OURS, END64, 32, struct.pack("<Q", 1 << 60)),
    "zip64 start": with_field(OURS, END64, 48, struct.pack("<Q", 1 << 63)),
    "zip64 size": with_field(OURS, END64, 40, struct.pack("<Q", (1 << 64) - 1)),
    "zip64 place": with_field(OURS, b"PK\6\7", 8, struct.pack("<Q", 1 << 62)),
    "zip64 and not": with_field(OURS, END, 16, b"\1\0\0\0"),
    "no pickle": zip_of(MEMBERS[1:]),
    "no storage": zip_of(MEMBERS[:1]),
    "short storage": zip_of([MEMBERS[0], ("a/data/0", b"0123456789ab")]),
    "long storage": zip_of([MEMBERS[0], ("a/data/0", b"0" * 20)]),
    "big-endian": zip_of([*MEMBERS, ("a/byteorder", b"big")]),
    "two folders": zip_of([*MEMBERS, ("b/version", b"3")]),
    "no folder": zip_of([*MEMBERS, ("version", b"3")]),
    "nul in a name": STORED.replace(b"a/data/0", b"a/data\x000"),
    "no zip": b"x" * 500,
    "empty": b"",
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", [*MALICIOUS, "duplicate names"])
def test_malicious_containers_are_refused(name: str, put: Put) -> None:
    twice = [*MEMBERS, ("a/data/0", b"another 16 bytes")]
    blob = MALICIOUS[name] if name in MALICIOUS else zip_of(twice)
    with pytest.raises(FormatError):
        locate(put(blob))


@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    blob = bytearray(OURS)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    fd = os.memfd_create("blob")
    try:
        os.pwrite(fd, bytes(blob), 0)
        found = locate((fd, 0, len(blob)))
        assert 0 <= found.offset <= len(blob) - int(np.prod(found.shape)) * found.dtype.itemsize
    except FormatError:
        return
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x04tQ", b"K\x05tQ"),
        (b"K\x04tQ", b"J\xff\xff\xff\xfftQ"),
        (b"tQK\0", b"tQK\1"),
        (b"(K\x04t", b"(K\x05t"),
        (b"(K\x01t", b"(K\x02t"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),
        (b"FloatStorage", b"OtherStorage"),
        (b"_rebuild_tensor_v2", b"_rebuild_nothing_x"),
    ],
)
def test_a_pickle_that_lies_about_its_storage_is_refused(old: bytes, new: bytes, put: Put) -> None:
    pickle = MEMBERS[0][1]
    assert old in pickle
    with pytest.raises(FormatError):
        locate(put(zip_of([("a/data.pkl", pickle.replace(old, new, 1)), MEMBERS[1]])))
