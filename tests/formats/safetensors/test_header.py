"""Headers of safetensors: broken and hostile ones are refused, odd but valid ones are read."""

import json
import struct
import subprocess
import sys

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.formats.safetensors.reader import open_checkpoint
from tests.support.errors import raises
from tests.support.limits import is_within


def encode(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(dtype="F32", shape=(2, 3), data_offsets=(0, 24)):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


TWO = {"a": one(), "b": one("I8", (8,), (24, 32))}
HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\1\0\0\0\0\0\0",
    "length 2^64-1": b"\xff" * 8 + b"{}",
    "length 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "length past the end": struct.pack("<Q", 3) + b"{}",
    "length over the limit": struct.pack("<Q", 100_000_001) + b"{}",
    "length 0": bytes(8),
    "not an object": encode(b"[]"),
    "space first": encode(b" {}"),
    "byte order mark": encode(b"\xef\xbb\xbf{}"),
    "utf-16": encode("{}".encode("utf-16")),
    "not utf-8": encode(b'{"\xff":{}}'),
    "half a character": encode({"\ud800": one()}, bytes(24)),
    "no json": encode(b"{'a': 1}"),
    "text after": encode(b"{}x"),
    "duplicate tensor": encode(
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "duplicate field": encode(
        b'{"a":{"dtype":"I8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"x"
    ),
    "duplicate metadata": encode(b'{"__metadata__":{"a":"b","a":"c"}}'),
    "NaN": encode(b'{"a":{"dtype":"I8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "Infinity": encode(b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,-Infinity]}}', b"x"),
    "deep list": encode(b'{"a":' + b"[" * 200_000),
    "deep object": encode(b'{"a":' * 200_000),
    "digits": encode(
        b'{"a":{"dtype":"I8","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,1]}}'
    ),
    "float size": encode({"a": one(shape=(2.0, 3))}, bytes(24)),
    "bool size": encode({"a": one("I8", (True,), (0, 1))}, b"x"),
    "string size": encode({"a": one(shape=("2", 3))}, bytes(24)),
    "negative size": encode({"a": one(shape=(-2, -3))}, bytes(24)),
    "shape overflow": encode({"a": one("I8", (1 << 32, 1 << 32), (0, 0))}),
    "shape wraps to fit": encode({"a": one("I8", ((1 << 62) + 6, 4), (0, 24))}, bytes(24)),
    "size 2^63": encode({"a": one("I8", (1 << 63, 0), (0, 0))}),
    "too many dimensions": encode({"a": one("I8", (1,) * 65, (0, 1))}, b"x"),
    "bool offsets": encode({"a": one("I8", (1,), (False, True))}, b"x"),
    "float offsets": encode({"a": one("I8", (1,), (0, 1.0))}, b"x"),
    "one offset": encode({"a": one("I8", (1,), (1,))}, b"x"),
    "negative offset": encode({"a": one("I8", (2,), (-1, 1))}, b"x"),
    "backward": encode({"a": one("I8", (1,), (1, 0))}, b"x"),
    "offset 2^64": encode({"a": one("I8", (0,), (1 << 64, 1 << 64))}),
    "too short": encode({"a": one()}, bytes(23)),
    "trailing": encode({"a": one()}, bytes(25)),
    "no tensors, data": encode(b"{}", b"x"),
    "hole": encode({"a": one(), "b": one("I8", (8,), (25, 33))}, bytes(33)),
    "overlap": encode({"a": one(), "b": one("I8", (8,), (23, 31))}, bytes(31)),
    "same bytes": encode({"a": one(), "b": one()}, bytes(24)),
    "late start": encode({"a": one("I8", (1,), (1, 2))}, b"xx"),
    "unknown dtype": encode({"a": one("F31")}, bytes(24)),
    "dtype list": encode({"a": one(["F32"])}, bytes(24)),
    "shape of another dtype": encode({"a": one("F64")}, bytes(24)),
    "missing field": encode({"a": {"dtype": "I8", "shape": [0]}}),
    "extra field": encode({"a": one() | {"x": 1}}, bytes(24)),
    "null tensor": encode({"a": None}),
    "metadata of numbers": encode({"__metadata__": {"a": 1}}),
    "metadata list": encode({"__metadata__": []}),
    "metadata like a tensor": encode({"__metadata__": one("I8", [1], [0, 1])}, b"x"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, case):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[case])
    with raises(FormatError, file=path) as e:
        open_checkpoint(path)
    assert len(str(e.value)) < 1000


def test_odd_but_valid_headers_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    as_metadata = {"__metadata__": {"dtype": "x", "shape": "y", "data_offsets": "z"}}
    for header, data in [
        (encode(b"{}"), 0),
        (encode(b"{}  \n"), 0),
        (encode({k: one("I8", (0,), (0, 0)) for k in ("dtype", "shape", "data_offsets")}), 3),
        (encode(as_metadata), 0),
        (encode({"../../etc/passwd": one("I8", (0,), (0, 0))}), 1),
        (encode({"a": dict(reversed(one("I8", (0,), (0, 0)).items()))}), 1),
        (encode({"b": one("I8", (8,), (24, 32)), "a": one()}, bytes(32)), 2),
    ]:
        path.write_bytes(header)
        assert len(open_checkpoint(path).tensors) == data


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 65) | st.floats() | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=6,
)
sizes = st.integers(0, 9) | json_values
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["I8", "F32", "F8_E5M2", "X"]) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.sampled_from("abc") | st.just("__metadata__"), entries | json_values)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(header=headers | st.binary(max_size=40), size=st.integers(0, 40))
def test_what_we_accept_the_library_accepts(tmp_path, header, size):
    path = tmp_path / "x.safetensors"
    data = encode(header, bytes(size))
    path.write_bytes(data)
    try:
        c = open_checkpoint(path)
    except FormatError:
        return
    tensors = dict(safetensors.deserialize(data))
    assert {t.name: list(t.shape) for t in c.tensors} == {k: v["shape"] for k, v in tensors.items()}


MEASURE = """
import resource, sys, time
from pathlib import Path
from megtool.formats.safetensors.reader import open_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
assert len(open_checkpoint(Path(sys.argv[1])).tensors) == int(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - start)
"""


def test_a_header_of_very_many_tensors_stays_in_proportion(tmp_path):
    path, count = tmp_path / "x.safetensors", 100_000
    tensors = {f"t{i}": one("I8", (0,), (0, 0)) for i in range(count - 1)}
    tensors["wide"] = one("I8", (1,) * 15 + (0,), (0, 0))
    path.write_bytes(encode(tensors))
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, path, str(count)], capture_output=True, text=True
    )
    kib, seconds = map(float, out.stdout.split())
    assert kib * 1024 < 25 * path.stat().st_size
    assert is_within(seconds, 4)
