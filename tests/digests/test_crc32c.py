"""Digests agree with CRC-32C of the whole whatever the pieces; sidecars are read strictly."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from megtool.digests.crc32c import (
    SIDECAR,
    Digests,
    FileDigest,
    Sidecar,
    StoredDigest,
    TensorDigest,
    encode_sidecar,
    parse_sidecar,
    read_sidecar,
)
from megtool.dtypes import DTYPES, dtype
from megtool.errors import FormatError
from tests.support.errors import raises


@given(st.data())
def test_pieces_in_any_order_give_the_crc_of_the_whole(data: st.DataObject) -> None:
    whole = data.draw(st.binary(max_size=300))
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=8))})
    pieces = data.draw(st.permutations(list(pairwise(cuts))))
    digests, others = Digests({"w": len(whole)}), Digests({"w": len(whole)})
    if not whole:
        digests.add("w", 0, b"")
    for number, (a, b) in enumerate(pieces):
        assert digests.get("w") is None
        (digests if number % 2 else others).add("w", a, memoryview(whole)[a:b])
        if number == len(pieces) - 1:
            digests.merge(others)
    assert digests.get("w") == crc32c(whole)


@given(st.binary(max_size=50), st.integers(0, 10_000), st.binary(max_size=50))
def test_zeros_cost_nothing_and_count(before: bytes, zeros: int, after: bytes) -> None:
    whole = before + bytes(zeros) + after
    digests = Digests({"w": len(whole)})
    digests.add_zeros("w", len(before), zeros)
    digests.add("w", len(before) + zeros, after)
    digests.add("w", 0, before)
    assert digests.get("w") == crc32c(whole)


def test_the_known_value_of_crc32c() -> None:
    digests = Digests({"a": 9})
    digests.add("a", 4, b"56789")
    digests.add("a", 0, b"1234")
    assert digests.complete() == {"a": 0xE3069283}


def test_arrays_of_any_dtype_and_shape_are_bytes() -> None:
    array = np.arange(24, dtype="<u2").reshape(2, 3, 4)
    digests = Digests({"a": array.nbytes})
    digests.add("a", 0, array)
    assert digests.get("a") == crc32c(array.tobytes())


def test_a_tensor_of_many_terabytes() -> None:
    size = 2**45
    digests = Digests({"a": size})
    digests.add_zeros("a", 1, size - 1)
    digests.add("a", 0, b"x")
    shorter = Digests({"a": size - 1})
    shorter.add_zeros("a", 1, size - 2)
    shorter.add("a", 0, b"x")
    first = shorter.get("a")
    assert first is not None
    assert digests.get("a") == crc32c(b"\0", first)


def test_an_unfinished_tensor_has_no_digest_and_an_empty_one_has_once_seen() -> None:
    digests = Digests({"a": 4, "empty": 0})
    digests.add("a", 0, b"abc")
    assert digests.complete() == {}
    digests.add("empty", 0, b"")
    assert digests.complete() == {"empty": 0}
    assert digests.get("another") is None


@pytest.mark.parametrize(("offset", "data"), [(-1, b"a"), (2, b"abc"), (5, b"")])
def test_a_piece_outside_the_tensor_is_refused(offset: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="not within"):
        Digests({"a": 4}).add("a", offset, data)


def test_adding_bytes_twice_is_refused() -> None:
    digests = Digests({"a": 4})
    digests.add("a", 0, b"abc")
    with pytest.raises(ValueError, match="more than"):
        digests.add("a", 0, b"ab")


def test_threads_add_at_the_same_time() -> None:
    whole = np.random.default_rng(1).bytes(1 << 16)
    digests = Digests({"a": len(whole)})

    def add(first: int) -> None:
        for at in range(first * 16, len(whole), 64):
            digests.add("a", at, whole[at : at + 16])

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert digests.get("a") == crc32c(whole)


EXAMPLE = Sidecar(
    names="canonical",
    family="llama",
    tool="megtool 0.1",
    tensors={
        "b": TensorDigest(crc32c=1, dtype=dtype("bfloat16"), shape=(2, 3)),
        "a\n\u00e4": TensorDigest(crc32c=0xFFFFFFFF, dtype=dtype("float32"), shape=()),
    },
    stored_tensors={
        "scale": StoredDigest(
            crc32c=2, dtype=dtype("float32"), shape=(1,), file="a/b.safetensors", begin=8, size=4
        )
    },
    files={"config.json": FileDigest(size=12, crc32c=3)},
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.builds(
            TensorDigest,
            crc32c=st.integers(0, 2**32 - 1),
            dtype=st.sampled_from(DTYPES),
            shape=st.lists(st.integers(0, 2**63 - 1), max_size=4).map(tuple),
        ),
        max_size=4,
    )
)
def test_a_sidecar_comes_back(tensors: dict[str, TensorDigest]) -> None:
    sidecar = Sidecar(names="stored", tool="megtool 0.1", tensors=tensors)
    assert parse_sidecar(encode_sidecar(sidecar), Path(SIDECAR)) == sidecar


def test_a_sidecar_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / SIDECAR
    assert read_sidecar(path) is None
    path.write_bytes(encode_sidecar(EXAMPLE))
    assert read_sidecar(path) == EXAMPLE
    path.write_bytes(encode_sidecar(Sidecar(names="stored", tool="t", tensors={})))
    assert read_sidecar(path) == Sidecar(names="stored", tool="t", tensors={})


def with_changes(**changes: Any) -> bytes:
    """The example with other values, and a right digest of itself."""
    values = json.loads(encode_sidecar(EXAMPLE)) | changes
    del values["crc32c"]
    data = json.dumps(values)[:-1].encode()
    return data + b',\n"crc32c": "%08x"}\n' % crc32c(data)


def with_entry(**changes: Any) -> bytes:
    entry = {"crc32c": "00000001", "dtype": "int8", "shape": [1]} | changes
    return with_changes(tensors={"w": entry})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "damaged"),
        (b"[1]", "not an object"),
        (b"\xff", "damaged"),
        (b"\xef\xbb\xbf{}", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"version": NaN}', "NaN"),
        (b'{"version": 1, "version": 1}', "duplicate key"),
        (b'{"version": ' + b"9" * 5000 + b"}", "damaged"),
        (with_changes(version=1), "version 1"),
        (with_changes(files=[]), "list"),
        (with_changes(files={"/etc/passwd": {"crc32c": "00000001", "size": 1}}), "no path"),
        (with_changes(files={"a/../../b": {"crc32c": "00000001", "size": 1}}), "no path"),
        (with_changes(files={"a": {"crc32c": "1", "size": 1}}), "crc32c '1'"),
        (with_changes(files={"a": {"crc32c": "00000001", "size": -1}}), "size -1"),
        (with_changes(stored_tensors={"a": {}}), "crc32c None"),
        (with_changes(algorithm="md5"), "md5"),
        (with_changes(names="other"), "other"),
        (with_changes(family=3), "family 3"),
        (with_changes(tensors=[]), "list"),
        (with_changes(tensors={"w": 1}), "crc32c None"),
        (with_entry(crc32c="1"), "crc32c '1'"),
        (with_entry(crc32c="0000000G"), "0000000G"),
        (with_entry(dtype="float13"), "float13"),
        (with_entry(dtype=[]), "dtype"),
        (with_entry(shape=[-1]), "shape"),
        (with_entry(shape=[True]), "shape"),
        (with_entry(shape=[2**63]), "shape"),
        (with_entry(shape=None), "shape"),
        (encode_sidecar(EXAMPLE)[:-5], "damaged"),
        (encode_sidecar(EXAMPLE)[:-1], "the end"),
        (encode_sidecar(EXAMPLE).replace(b"megtool 0.1", b"megtool 0.2"), "their own digest"),
    ],
)
def test_a_bad_sidecar_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / SIDECAR
    path.write_bytes(data)
    with raises(FormatError, match=words, file=path, hint=True):
        read_sidecar(path)


def test_the_sidecar_grows_with_the_number_of_tensors_only() -> None:
    entry = TensorDigest(crc32c=7, dtype=dtype("bfloat16"), shape=(2**40, 4096))
    tensors = {f"layers.{n}.weight": entry for n in range(1000)}
    assert len(encode_sidecar(Sidecar(names="stored", tool="t", tensors=tensors))) < 110_000
