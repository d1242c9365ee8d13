"""Elements as numbers, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.dtypes import DTYPES, dtype
from megtool.transport.cast import numeric_values

EIGHT = [d.name for d in DTYPES if d.is_float and d.itemsize == 1]


@pytest.mark.parametrize("name", EIGHT)
def test_all_values_of_eight_bits(name: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(bits).view(getattr(torch, name)).float().numpy()
    np.testing.assert_array_equal(numeric_values(bits, dtype(name)), want)


def test_all_values_of_bfloat16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(numeric_values(bits, dtype("bfloat16")), want)


@pytest.mark.parametrize("name", ["float64", "float16", "int64", "uint8", "bool", "complex64"])
def test_types_that_numpy_knows_stay(name: str) -> None:
    array = np.array([0, 1], dtype(name).view)
    assert numeric_values(array, dtype(name)).dtype == dtype(name).view
