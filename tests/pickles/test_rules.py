"""What a written pickle may hold: the allow-list, its forms, and bytes that are pickles."""

from __future__ import annotations

import argparse
import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from pathlib import PosixPath
from signal import Signals
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.megatron_state.extra_states.te_state import decode, make_bytes_tensor, to_tree
from megtool.pickles import reader as pickle_reader
from megtool.pickles.allow_list import ALLOWED_GLOBALS, GlobalForm
from megtool.pickles.payload import read_payload, scan_pickle
from megtool.pickles.rewrite import drop_problems, encode_payload
from megtool.pickles.rules import find_problems
from megtool.pickles.torch_file import plan_torch_file
from megtool.pickles.writer import encode
from megtool.pickles.zip_reader import load_object_bytes
from megtool.pickles.zip_writer import encode_object
from tests.support.checkpoints.hostile_pickles import (
    HOSTILE_GLOBALS,
    as_tree,
    hostile_values,
    named_globals,
    pickled,
    zipped,
)
from tests.support.checkpoints.te_payloads import DELAYED_2_4, DELAYED_2_20, MXFP8_2_4

VALUES = dict(hostile_values())
PAYLOADS = {"2.4": DELAYED_2_4, "MXFP8": MXFP8_2_4, "2.20": DELAYED_2_20}


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_there_are_hundreds() -> None:
    assert len(VALUES) > 700
    assert len(HOSTILE_GLOBALS) > 120


@pytest.mark.parametrize("part", range(8))
def test_no_hostile_value_is_written_and_what_is_left_is_sound(part: int, audit: Any) -> None:
    audit.seen.clear()
    audit.watching = True
    try:
        for title, value in list(VALUES.items())[part::8]:
            try:
                tree = as_tree(value)
            except FormatError:
                continue  # the reader knows it already
            assert find_problems(tree), title
            for write in (encode, encode_object, plan_torch_file):
                with pytest.raises(FormatError) as e:
                    write({"evil": tree})
                assert e.value.hint
                assert e.value.id == "hostile-pickle"
            rest, dropped = drop_problems({"good": [1], "evil": tree, "other": {"evil": tree}})
            assert dropped
            assert rest["good"] == [1]
            assert find_problems(rest) == ()
            allowed = set(ALLOWED_GLOBALS)
            assert named_globals(encode(rest)) | named_globals(encode_object(rest)) <= allowed
    finally:
        audit.watching = False
    assert audit.seen == []


def test_nothing_hostile_is_on_the_list() -> None:
    assert set(HOSTILE_GLOBALS) & set(ALLOWED_GLOBALS) == set()
    assert all(module and name for module, name in ALLOWED_GLOBALS)
    torch_functions = {
        name
        for (module, name), form in ALLOWED_GLOBALS.items()
        if module == "torch" and form is not GlobalForm.VALUE
    }
    assert torch_functions == {"Size", "device"}


def test_what_checkpoints_hold_is_written_as_it_was() -> None:
    value = {
        "args": argparse.Namespace(
            params_dtype=torch.bfloat16, save=PosixPath("/a"), exit_signal=Signals.SIGTERM
        ),
        "simple": SimpleNamespace(a=[1]),
        "random": [random.Random(1).getstate(), np.random.RandomState(1).get_state()],
        "arrays": [np.arange(6.0).reshape(2, 3), np.float32(2.5), np.array(["a", None], object)],
        "tensors": [torch.ones(2, 3).t(), torch.zeros(3, dtype=torch.uint16), torch.Size([1])],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "dicts": [OrderedDict(a=1), defaultdict(list, {1: [2]}), Counter("aab")],
        "generator": torch.Generator().manual_seed(5),
        "sets": [{1, 2}, frozenset({3})],
        "bytes": [b"", b"\x80\x02", bytearray(b"abc")],
        "other": [slice(1, 2), range(3), 1j, torch.device("cpu"), torch.nn.functional.gelu],
    }
    tree = load_object_bytes(saved(value), file="x")
    assert find_problems(tree) == ()
    back = torch.load(io.BytesIO(encode_object(tree)), weights_only=False)
    assert back["args"] == value["args"]
    assert back["simple"] == value["simple"]
    assert back["dicts"] == value["dicts"]
    assert type(back["dicts"][1]) is defaultdict
    assert back["sets"] == value["sets"]
    assert back["generator"].initial_seed() == 5
    assert back["bytes"] == value["bytes"]
    assert back["other"] == value["other"]
    assert back["random"][0] == value["random"][0]  # type: ignore[index]
    assert np.array_equal(back["random"][1][1], value["random"][1][1])  # type: ignore[index]
    for a, b in zip(back["arrays"], value["arrays"], strict=True):  # type: ignore[call-overload]
        assert np.array_equal(a, b)
    for a, b in zip(back["tensors"], value["tensors"], strict=True):  # type: ignore[call-overload]
        assert a.equal(b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("release", PAYLOADS)
def test_an_extra_state_is_encoded_again(release: str) -> None:
    data = PAYLOADS[release]
    again = encode_payload(data, encode_object)
    assert again != data
    assert encode_payload(again, encode_object) == again
    assert named_globals(again) <= set(ALLOWED_GLOBALS)
    old, new = decode(data), decode(again)
    assert old is not None
    assert new is not None
    assert old.recipe.keys() == new.recipe.keys()
    assert old.recipe_name == new.recipe_name
    assert old.tensors.keys() == new.tensors.keys()
    assert all(np.array_equal(t, new.tensors[n]) for n, t in old.tensors.items())
    assert encode(to_tree(new)) == encode(to_tree(old))


def test_a_tensor_of_bytes_holds_the_new_encoding() -> None:
    tree = load_object_bytes(encode_object([make_bytes_tensor(DELAYED_2_4)]), file="x")
    (tensor,) = torch.load(io.BytesIO(encode_object(tree)), weights_only=True)
    written = tensor.numpy().tobytes()
    assert written == encode_payload(DELAYED_2_4, encode_object)
    assert decode(written) is not None


@pytest.mark.parametrize("step", [1, 2, -1])
def test_a_hostile_pickle_is_no_better_spread_over_a_storage(step: int) -> None:
    """Transformer Engine unpickles the tensor's bytes in its own order, not the storage's."""
    evil = np.frombuffer(pickled(b"ctorch\nload\n)R"), np.uint8)
    if step == -1:  # a column of a matrix
        matrix = torch.from_numpy(np.stack([np.zeros_like(evil), evil], axis=1).copy())
        view = matrix[:, 1]
    else:
        spread = np.zeros(len(evil) * step + 7, np.uint8)
        spread[7::step] = evil
        view = torch.from_numpy(spread)[7::step]
    assert view.numpy().tobytes() == evil.tobytes()
    tree = load_object_bytes(saved([view]), file="x")
    assert any("torch.load" in p for p in find_problems(tree))
    with pytest.raises(FormatError):
        encode_object(tree)


def test_bytes_that_only_look_like_pickles_stay() -> None:
    rng = np.random.default_rng(0)
    for number in range(3000):
        data = bytes((0x80, 2 + number % 4)) + rng.bytes(200)
        assert read_payload(data) is None
        assert encode_payload(data, encode_object) == data
    for data in (b"", b".", b"PK\3\4", b"cat\nmat\nhat", b"\x80\x04\x93.", b"\x80\x02}.x"):
        assert encode_payload(data, encode_object) == data


def test_damage_does_not_hide_what_comes_before_it() -> None:
    call = b"ctorch\nload\nX\1\0\0\0a\x85R"
    for data in (call + b".", call, b"\x80\x02" + call + b"\0", b"\x80\x02" + call + b".PK"):
        assert scan_pickle(data).names == ("torch.load",)
        (problem,) = find_problems({"a": data})
        assert "torch.load" in problem
    assert read_payload(zipped(call)) is not None
    assert find_problems({"a": zipped(call)}) == ("torch.load",)


def test_pickles_nested_without_end_are_refused() -> None:
    data = pickled(b"ccollections\nOrderedDict\n)R")
    for _ in range(12):
        data = pickle.dumps(data, 3)
    with pytest.raises(FormatError, match="nested"):
        encode({"a": data})


def test_entries_and_attributes_are_left_out_one_by_one() -> None:
    value = {
        "args": argparse.Namespace(a=1, b=2),
        "ordered": OrderedDict(a=1, b=2),
        "list": [[1], [2]],
        "good": {"a": {"b": 1}},
    }
    tree = pickle_reader.decode(pickle.dumps(value, 2), file="x")
    evil = as_tree(b"cmycompany\nSettings\n)R")
    tree["args"].state["b"] = evil
    tree["ordered"].pairs[1] = ("b", [evil])
    tree["list"][1].append(evil)
    rest, dropped = drop_problems(tree)
    assert set(dropped) == {"args.b", "ordered.b", "list"}
    assert set(dropped.values()) == {("mycompany.Settings",)}
    assert pickle.loads(encode(rest)) == {
        "args": argparse.Namespace(a=1),
        "ordered": OrderedDict(a=1),
        "good": {"a": {"b": 1}},
    }
    assert rest["good"] is tree["good"]
    assert tree["args"].state["b"] is evil
    assert drop_problems(evil) == (None, {"": ("mycompany.Settings",)})
    sound = {"a": [1]}
    assert drop_problems(sound)[0] is sound


@pytest.mark.parametrize("name", ["CudaGraphModule", "InferenceCudaGraphScope", "CudaGraphScope"])
def test_enumerations_of_megatrons_args_are_written_as_they_were(name: str) -> None:
    """Members that every save of Megatron-LM 0.19 has in its args; they pickle as calls."""
    module = "megatron.core.transformer.enums"
    data = f"\x80\x02c{module}\n{name}\nK\x02\x85R.".encode("latin-1")
    tree = pickle_reader.decode(data, file="x")
    assert find_problems({"args": tree}) == ()
    assert named_globals(encode(tree)) == {(module, name)}
