"""Small floats beside torch's casts (8 bits) and ml_dtypes' (4 bits), over all short inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.number_formats.rounding import (
    integer_codes,
    rounded,
    small_codes,
)
from megtool.number_formats.small_floats import E2M1, SMALL
from tests.support.errors import raises


def _inputs() -> Iterator[np.ndarray]:
    """All bfloat16 and float16 values, float32 one last place beside them, and random bits."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    rng = np.random.default_rng(3)
    yield (bits << 16).view(np.float32)
    yield ((bits << 16) + 1).view(np.float32)
    yield ((bits << 16) - 1).astype(np.uint32).view(np.float32)
    yield bits.astype(np.uint16).view(np.float16).astype(np.float32)
    yield rng.integers(0, 1 << 32, 300_000, np.uint32).view(np.float32)
    spread = np.exp2(rng.integers(-24, 20, 300_000))
    yield (rng.standard_normal(300_000) * spread).astype(np.float32)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_as_torch(name: str) -> None:
    kind = SMALL[name]
    for x in _inputs():
        kept = x.copy()
        plain = torch.from_numpy(x.copy()).clamp(-kind.largest, kind.largest)
        want = plain.to(getattr(torch, name)).view(torch.uint8).numpy()
        np.testing.assert_array_equal(small_codes(x, kind), want)
        assert kept.tobytes() == x.tobytes(), "the input is left alone"


def test_four_bits_as_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for x in _inputs():
        x = x[~np.isnan(x)]
        want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        want = np.where(x == 0, 0, want)
        np.testing.assert_array_equal(small_codes(x, E2M1), want)
    with raises(FormatError, id="nan-weights"):
        small_codes(np.float32([1, np.nan]), E2M1)
    with raises(FormatError, id="nan-weights"):
        integer_codes(np.float32([1, np.nan]), -8, 7)


def test_ties_towards_zero() -> None:
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    for x in _inputs():
        x = x[~np.isnan(x)]
        want = torch.bucketize(torch.from_numpy(np.abs(x)), borders).numpy() | ((x <= 0) << 3)
        np.testing.assert_array_equal(small_codes(x, E2M1, half_down=True), want)


def test_any_shape_and_none() -> None:
    x = np.linspace(-500, 500, 3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)
    kind = SMALL["float8_e4m3fn"]
    np.testing.assert_array_equal(small_codes(x, kind).ravel(), small_codes(x.ravel().copy(), kind))
    assert small_codes(np.empty((0, 4), np.float32), kind).shape == (0, 4)
    assert integer_codes(np.empty((0, 4), np.float32), -8, 7).shape == (0, 4)


@pytest.mark.parametrize(("low", "high"), [(-8, 7), (-128, 127)])
def test_integers(low: int, high: int) -> None:
    x = np.concatenate([np.arange(-300, 300, 0.25), [np.inf, -np.inf, 1e30, -0.0]])
    x = x.astype(np.float32)
    want = np.clip(np.rint(x), low, high).astype(np.int8)
    np.testing.assert_array_equal(integer_codes(x, low, high), want)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_wider_types(name: str) -> None:
    for x in _inputs():
        want = torch.from_numpy(x.copy()).to(getattr(torch, name)).float().numpy()
        np.testing.assert_array_equal(rounded(x.copy(), name), want)
        kept = x.copy()
        assert rounded(kept, "float32") is kept
