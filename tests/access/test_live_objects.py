"""Values of objects without a pickle: what is built, and what is left out and named."""

from __future__ import annotations

import argparse
import collections
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megtool.access.live_objects import live_value
from megtool.pickles.zip_reader import load_object

STRIDED = torch.arange(24.0).reshape(4, 6)[1:3, ::2]


def read(value: Any, path: Path) -> tuple[Any, list[str]]:
    """What torch saved, as inert data and then live again, with the names of what is left out."""
    torch.save(value, path / "object.pt")
    left_out: list[str] = []
    with (path / "object.pt").open("rb") as file:
        size = (path / "object.pt").stat().st_size
        tree = load_object(file.fileno(), 0, size, file=path / "object.pt")
    return live_value(tree, "value", left_out), left_out


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**70),
        2.5,
        "text",
        b"bytes",
        [1, (2, "three"), {"four": 5}],
        {1: "one", ("two", 3): {"four": None}},
        torch.bfloat16,
        torch.Size((2, 3)),
        collections.deque([1, 2]),
        argparse.Namespace(lr=0.1, layers=[1, 2]),
    ],
    ids=repr,
)
def test_values_are_what_they_were(value: Any, tmp_path: Path) -> None:
    live, left_out = read(value, tmp_path)
    assert type(live) is type(value)
    assert live == value
    assert not left_out


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7.0),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.randn(3, 5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 4),
        STRIDED,
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)}",
)
def test_tensors_are_copies_of_their_elements(tensor: torch.Tensor, tmp_path: Path) -> None:
    live, left_out = read({"tensor": tensor}, tmp_path)
    assert live["tensor"].dtype == tensor.dtype
    assert live["tensor"].equal(tensor)
    assert not left_out


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["<i8", ">f4", "u1"])
def test_arrays_keep_their_order_and_type(order: Any, kind: str, tmp_path: Path) -> None:
    array = np.array(np.arange(6).reshape(2, 3), dtype=kind, order=order)
    live, left_out = read(array, tmp_path)
    assert np.array_equal(live, array)
    assert live.dtype == array.dtype
    assert not left_out


def test_streams_of_bytes_are_streams(tmp_path: Path) -> None:
    live, left_out = read(io.BytesIO(b"state"), tmp_path)
    assert live.getvalue() == b"state"
    assert not left_out


def test_what_cannot_be_built_is_left_out_and_named(tmp_path: Path) -> None:
    """No class of a pickle is imported; what stands beside its objects stays."""
    value = {
        "kept": 1,
        "path": Path("somewhere"),
        "space": SimpleNamespace(kept=2, path=Path("elsewhere")),
        "list": [1, Path("a part of it")],
    }
    live, left_out = read(value, tmp_path)
    assert live == {"kept": 1, "space": argparse.Namespace(kept=2)}
    assert left_out == ["value.path", "value.space.path", "value.list[1]"]


def test_nothing_but_an_object_that_cannot_be_built_is_none(tmp_path: Path) -> None:
    live, left_out = read(Path("somewhere"), tmp_path)
    assert live is None
    assert left_out == ["value"]
