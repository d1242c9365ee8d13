"""Small floats, all values of each: equal to what another project's types hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.number_formats.small_floats import eight_bit_values, four_bit_pairs, single


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(256,), (2, 128), (257, 1), (16, 16)])
def test_every_byte(name: str, shape: tuple[int, ...]) -> None:
    raw = np.resize(np.arange(256, dtype=np.uint8), shape)
    want = torch.from_numpy(raw.copy()).view(getattr(torch, name)).to(torch.float32).numpy()
    np.testing.assert_array_equal(eight_bit_values(raw, name), want)
    np.testing.assert_array_equal(single(raw, name), want)


def test_every_pair_of_four_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    raw = np.arange(256, dtype=np.uint8).reshape(4, 64)
    nibbles = np.stack([raw & 15, raw >> 4], axis=-1).reshape(4, 128)
    want = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    found = four_bit_pairs(raw)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(want))


def test_wide_types_and_bits_out_of_order() -> None:
    half = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    raw = half.view(torch.int16).numpy().view("<u2")
    np.testing.assert_array_equal(single(raw.T, "bfloat16"), half.float().numpy().T)
    np.testing.assert_array_equal(single(np.float16([[1, 2.5]]), "float16"), np.float32([[1, 2.5]]))
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(
        eight_bit_values(every.T, "float8_e5m2"), eight_bit_values(every, "float8_e5m2").T
    )
