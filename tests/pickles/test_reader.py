"""Pickles decoded as data: faithful to the harmless, deaf to the hostile."""

from __future__ import annotations

import argparse
import collections
import io
import math
import pathlib
import pickle
import struct
import types
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.pickles import guard as pickle_guard
from megtool.pickles import reader as pickle_reader
from megtool.pickles.writer import encode, make_namespace
from tests.support.errors import raises
from tests.support.threads import kill_threads, refuse_threads


def op_pickle(*codes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(codes) + b"."


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def nested_pairs(levels: int) -> bytes:
    """A tuple that takes 2**levels steps to hash, in a few bytes a level."""
    out = [b"N\x85q\x00"]
    for level in range(levels):
        out.append(b"h" + bytes((level,)) + b"\x86q" + bytes((level + 1,)))
    return b"".join(out)


SYSTEM = b"cos\nsystem\nX\x05\x00\x00\x00false\x85R"
HOSTILE = {
    "reduce": op_pickle(SYSTEM),
    "posix": op_pickle(SYSTEM.replace(b"os\n", b"posix\n", 1)),
    "eval": op_pickle(b"c__builtin__\neval\nX\x01\x00\x00\x001\x85R"),
    "getattr": op_pickle(b"cbuiltins\ngetattr\n", b"cos\nsystem\nX\x01\x00\x00\x00a\x86R"),
    "getattr of harmless": op_pickle(
        b"cbuiltins\ngetattr\nccollections\nOrderedDict\nX\1\0\0\0a\x86R"
    ),
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05false\x85R.",
    "subprocess": op_pickle(b"csubprocess\nPopen\nX\x04\x00\x00\x00true\x85R"),
    "import": op_pickle(b"cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85R"),
    "runpy": op_pickle(b"crunpy\nrun_path\nX\x01\x00\x00\x00a\x85R"),
    "torch.hub": op_pickle(b"ctorch.hub\nload\nX\x01\x00\x00\x00a\x85R"),
    "inst": op_pickle(b"(X\x05\x00\x00\x00falseios\nsystem\n"),
    "obj": op_pickle(b"(cos\nsystem\nX\x05\x00\x00\x00falseo"),
    "ext1": op_pickle(b"\x82\x01"),
    "ext4": op_pickle(b"\x84\x01\x00\x00\x00"),
    "call of a result": op_pickle(b"ca\nb\n)R)R"),
    "build on a class": op_pickle(b"ca\nb\n}X\x01\x00\x00\x00xK\x01sb"),
    "build on a list": op_pickle(b"]}X\x01\x00\x00\x00xK\x01sb"),
    "build twice": op_pickle(b"ca\nb\n)R}b}b"),
    "memo bomb": op_pickle(b"Nr\xff\xff\xff\x7f"),
    "memo bomb in text": op_pickle(b"Np99999999999\n"),
    "long bomb": op_pickle(b"\x8b\xff\xff\xff\x7f"),
    "bytes bomb": op_pickle(b"\x8e" + struct.pack("<Q", 1 << 60)),
    "bytearray bomb": op_pickle(b"\x96" + struct.pack("<Q", 1 << 60)),
    "frame bomb": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "key that takes forever": op_pickle(b"}", nested_pairs(60), b"Ns"),
    "element that takes forever": b"\x80\x04\x8f(" + nested_pairs(60) + b"\x90.",
    "key too deep for the stack": op_pickle(b"})", b"\x85" * 200_000, b"Ns"),
    "digits": op_pickle(b"L" + b"9" * 100_000 + b"L\n"),
    "no stack": op_pickle(b"\x85"),
    "no mark": op_pickle(b"t"),
    "no memo": op_pickle(b"h\x05"),
    "no end": b"\x80\x02N",
    "text without end": b"\x80\x02ca",
    "protocol": b"\x80\xffN.",
    "trailing": op_pickle(b"N") + b"x",
    "out of band": b"\x80\x05\x97.",
    "empty": b"",
    "null": b"\0" * 100,
    "many globals": op_pickle(*(f"cm{i}\nx\n0".encode() for i in range(5000)), b"N"),
    "surrogates": op_pickle(b"X\x03\x00\x00\x00\xff\xff\xff"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_and_nothing_happens(name: str, audit: Any) -> None:
    audit.seen.clear()
    audit.watching = True
    try:
        with pytest.raises(FormatError) as e:
            pickle_reader.decode(HOSTILE[name], file="x.pt")
    finally:
        audit.watching = False
    assert audit.seen == []
    assert e.value.file == "x.pt"
    assert len(str(e.value)) < 500


LARGE = pickle.dumps(list(range(700_000)), 2)[2:-1]


@pytest.mark.parametrize(
    "name", [n for n in HOSTILE if n not in ("trailing", "empty", "null", "no end", "protocol")]
)
def test_a_large_pickle_gets_no_further(name: str, audit: Any) -> None:
    """Past the size whose opcodes are walked, memory is limited instead."""
    if "forever" in name:
        pytest.skip("costs time, in a large pickle; nothing else")
    data = HOSTILE[name]
    head, body = data[:2], data[2:]
    if body[:1] == b"\x95":
        pytest.skip("a frame is the first thing in a pickle")
    large = head + LARGE + b"0" + body
    assert len(large) > pickle_guard.SMALL_BYTES
    pickle_reader.decode(head + LARGE + b".", file="x.pt")  # imports what the guard needs
    audit.seen.clear()
    audit.watching = True
    try:
        tree = pickle_reader.decode(large, file="x.pt")
    except FormatError:
        tree = None
    finally:
        audit.watching = False
    assert {str(what) for _, what in audit.seen} <= {"/proc/self/statm"}
    assert tree is None or name in ("build on a class", "key too deep for the stack", "inst", "obj")


def test_every_truncation_is_an_error() -> None:
    data = pickle.dumps({"a": [1, (2, "b")], "c": argparse.Namespace(x=1)}, 2)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            pickle_reader.decode(data[:end], file="x")


@given(st.binary(max_size=60))
def test_noise_decodes_or_is_refused(data: bytes) -> None:
    try:
        pickle_reader.to_plain(pickle_reader.decode(b"\x80\x02" + data, file="x"))
    except FormatError:
        return


@given(st.data())
def test_flipped_bits_decode_or_are_refused(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps({"a": [1, (2, "b")], "c": argparse.Namespace(x=1.5)}, 2))
    good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        pickle_reader.to_plain(pickle_reader.decode(bytes(good), file="x"))
    except FormatError:
        return


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
    ),
)


@given(PLAIN)
def test_what_we_write_python_reads_and_so_do_we(value: Any) -> None:
    try:
        data = encode(value)
    except FormatError as e:  # bytes that are a pickle and name what they like
        assert e.id == "hostile-pickle"
        reject()
    assert pickle.loads(data) == value
    assert pickle_reader.to_plain(pickle_reader.decode(data, file="x")) == value


@given(PLAIN, st.sampled_from([2, 4, 5]))
def test_what_python_writes_we_read_and_write_again(value: Any, protocol: int) -> None:
    tree = pickle_reader.decode(pickle.dumps(value, protocol), file="x")
    try:
        data = encode(tree)
    except FormatError as e:  # bytes that are a pickle and name what they like
        assert e.id == "hostile-pickle"
        reject()
    assert pickle.loads(data) == value


def test_well_known_nodes_become_plain_and_return_as_they_were() -> None:
    value = {
        "args": argparse.Namespace(a=1, p=pathlib.PosixPath("/a/b"), d=torch.bfloat16),
        "simple": types.SimpleNamespace(x=[1]),
        "ordered": collections.OrderedDict(b=2, a=1),
        "default": collections.defaultdict(list, {1: [2]}),
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "layout": torch.strided,
        "function": torch.nn.functional.gelu,
    }
    for protocol in (2, 4):
        tree = pickle_reader.decode(pickle.dumps(value, protocol), file="x")
        shown = pickle_reader.to_plain(tree)
        assert shown["args"] == {"a": 1, "p": "/a/b", "d": "torch.bfloat16"}
        assert shown["simple"] == {"x": [1]}
        assert list(shown["ordered"].items()) == [("b", 2), ("a", 1)]
        assert shown["default"] == {1: [2]}
        assert shown["size"] == (2, 3)
        assert sorted(shown["set"]) == [1, 2]
        assert shown["function"].endswith("gelu")
        assert pickle.loads(encode(tree)) == value


def test_an_edited_namespace_is_written() -> None:
    tree = pickle_reader.decode(pickle.dumps({"args": argparse.Namespace(tp=8, pp=4)}, 2), file="x")
    tree["args"].state["tp"] = 2
    assert pickle.loads(encode(tree))["args"] == argparse.Namespace(tp=2, pp=4)
    assert pickle.loads(encode(make_namespace({"tp": 3}))) == argparse.Namespace(tp=3)


def test_shared_and_recursive_values_stay_so() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    out = pickle.loads(encode({"a": shared, "b": shared}))
    assert out["a"] is out["b"]
    assert out["a"][1] is out["a"]
    with pytest.raises(FormatError, match="no plain form"):
        pickle_reader.to_plain(shared)


def test_billion_laughs_stay_small() -> None:
    laugh: Any = ["ha"]
    for _ in range(60):
        laugh = [laugh, laugh]
    data = pickle.dumps(laugh, 2)
    tree = pickle_reader.decode(data, file="x")
    with raises(FormatError, id="hostile-pickle"):
        pickle_reader.to_plain(tree)
    assert len(encode(tree)) < 10 * len(data)
    assert pickle_reader.find_references(tree) == []


def test_persistent_ids_are_kept() -> None:
    class Saver(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", "seven") if type(obj) is int and obj == 7 else None

    out = io.BytesIO()
    Saver(out, 2).dump([7, 8])
    tree = pickle_reader.decode(out.getvalue(), file="x")
    assert tree[0].id == ("storage", "seven")
    assert pickle_reader.find_references(tree) == [tree[0]]
    assert encode(tree).count(b"Q") == 1


def test_what_cannot_be_written_says_so() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        encode({"a": object()})
    deep: Any = None
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        encode(deep)
    assert math.isnan(pickle.loads(encode(math.nan)))


@pytest.mark.parametrize("how", [kill_threads, refuse_threads])
def test_a_thread_for_nested_tuples_that_dies_or_cannot_start(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tuples need a thread with a deep stack."""
    data = pickle.dumps([(n,) for n in range(500_000)], 2)
    assert len(data) > pickle_guard.SMALL_BYTES
    assert len(pickle_reader.decode(data, file="x.pt")) == 500_000
    how(monkeypatch, *([{1}] if how is kill_threads else []))
    with raises(FormatError, "pickle"):
        pickle_reader.decode(data, file="x.pt")


def _shared(levels: int, width: int) -> Any:
    node: Any = ["x"] * width
    for _ in range(levels):
        node = [node] * width
    return node


@pytest.mark.parametrize("levels", [12, 60])
def test_shared_parts_do_not_make_a_large_tree(levels: int) -> None:
    with raises(FormatError, id="hostile-pickle"):
        pickle_reader.check_expansion(_shared(levels, 10), file="common.pt")
    pickle_reader.check_expansion(_shared(2, 10), file="common.pt")


def test_what_contains_itself_or_is_deep_has_no_plain_form() -> None:
    circle: list[Any] = [1]
    circle.append({"a": (circle,)})
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    for tree in (circle, deep, {"step": 1 << 100_000}):
        with raises(FormatError, id="hostile-pickle"):
            pickle_reader.check_expansion(tree, file="common.pt")
    laughs: Any = collections.OrderedDict(a=1)
    for _ in range(40):
        laughs = collections.OrderedDict(a=laughs, b=laughs)
    tree = pickle_reader.decode(pickle.dumps(laughs), file="common.pt")
    with raises(FormatError, id="hostile-pickle"):
        pickle_reader.check_expansion(tree, file="common.pt")
    again = [1]
    pickle_reader.check_expansion({"a": [again, again], "b": again}, file="common.pt")
