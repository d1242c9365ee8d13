"""Casts without torch give torch's bits."""

from __future__ import annotations

import platform
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.transport.cast import cast, encode_element, needs_torch

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIGNED = {2: torch.int16, 4: torch.int32}


def every_16_bits() -> NDArray[np.uint16]:
    return np.arange(1 << 16, dtype=np.uint16)


def bits_of_float32() -> NDArray[np.uint32]:
    """Random patterns, and all 16-bit upper halves with lower halves at and around a tie."""
    low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    edges = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low).reshape(-1)
    # Ties between neighbors of float16, subnormal ones of either type included.
    half = every_16_bits().view(np.float16).astype(np.float32).view(np.uint32)
    around = (half[:, None] + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001])).astype(np.uint32)
    drawn = np.random.default_rng(7).integers(0, 1 << 32, 1 << 22, np.uint32)
    return np.concatenate([edges, around.reshape(-1), drawn])


def by_torch(bits: NDArray[np.unsignedinteger], source: str, target: str) -> NDArray[np.generic]:
    width = bits.itemsize
    given = torch.from_numpy(bits.view(f"i{width}")).view(KINDS[source])
    out = given.to(KINDS[target])
    return out.view(SIGNED[out.element_size()]).numpy().view(f"u{out.element_size()}")


def is_nan(bits: NDArray[np.generic], kind: str) -> NDArray[np.bool_]:
    exponent = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[kind]
    return (bits & ((1 << 8 * bits.itemsize - 1) - 1)) > exponent


@pytest.mark.parametrize(("source", "target"), permutations(KINDS, 2))
def test_bits_are_those_of_torch(source: str, target: str) -> None:
    a, b = dtype(source), dtype(target)
    assert not needs_torch(a, b)
    bits = bits_of_float32() if source == "float32" else every_16_bits()
    out = np.empty(len(bits), b.view)
    cast(bits, a, out, b)
    found, want = out.view(f"u{b.itemsize}"), by_torch(bits, source, target)
    nan = is_nan(bits, source)
    assert nan.any()
    np.testing.assert_array_equal(found[~nan], want[~nan])
    assert is_nan(found[nan], target).all()
    if platform.machine() == "x86_64" and "float32" in (source, target):
        np.testing.assert_array_equal(found[nan], want[nan])


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float64", "float8_e8m0fnu"])
def test_numbers_that_become_infinite_are_counted(source: str) -> None:
    """65520 is the first that float16 rounds up to infinity; what was no number is not counted."""
    kind = getattr(torch, source)
    values = [1.0, 65504.0, 65519.0, 65520.0, -1e5, np.inf, np.nan, 2.0**100]
    given = (
        torch.tensor(values * 9).abs().to(kind)
        if "e8m0" in source
        else torch.tensor(values * 9, dtype=kind)
    )
    want = given.to(torch.float16).isinf() & given.double().isfinite()
    raw = given.view(torch.uint8).numpy().view(dtype(source).view)
    assert want.any()
    assert cast(raw, dtype(source), np.empty(len(raw), np.float16), dtype("float16")) == want.sum()
    for wide in {"float32", "bfloat16"} - {source}:
        other = np.empty(len(raw), dtype(wide).view)
        assert cast(raw, dtype(source), other, dtype(wide)) == 0


@pytest.mark.parametrize("size", [0, 1, 3, 1 << 15, (1 << 15) + 1])
def test_tiles_of_any_shape_are_cast(size: int) -> None:
    values = np.linspace(-3, 3, 2 * size, dtype=np.float32).reshape(2, size)
    out = np.empty((2, size), np.uint16)
    cast(values.view(np.uint32), dtype("float32"), out, dtype("bfloat16"))
    np.testing.assert_array_equal(out, by_torch(values.view(np.uint32), "float32", "bfloat16"))


def test_other_types_need_torch() -> None:
    assert needs_torch(dtype("float64"), dtype("float32"))
    assert not needs_torch(dtype("float64"), dtype("float64"))
    out = np.empty(2, np.float64)
    cast(np.array([1.5, -2], np.float32), dtype("float32"), out, dtype("float64"))
    assert out.tolist() == [1.5, -2]


def test_an_element_of_bfloat16_takes_no_torch() -> None:
    assert encode_element(1.0, dtype("bfloat16")).tolist() == [0x3F80]
    code = (
        "import sys; from megtool.transport.cast import encode_element;"
        "from megtool.dtypes import dtype; encode_element(1.0, dtype('bfloat16'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0
