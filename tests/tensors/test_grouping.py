"""Equal integers: found as numpy finds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.tensors.grouping import distinct, grouped


@pytest.mark.parametrize("values", [[], [3], [2, 1, 2, -5], [[1, 0], [0, 1]]])
def test_distinct_values_are_those_of_numpy(values: list[int]) -> None:
    array = np.array(values, np.int64)
    np.testing.assert_array_equal(distinct(array), np.unique(array))


@given(st.lists(st.integers(-4, 4)))
def test_groups_are_those_of_numpy(values: list[int]) -> None:
    array = np.array(values, np.int64)
    _, first, which = np.unique(array, return_index=True, return_inverse=True)
    got = grouped(array)
    np.testing.assert_array_equal(got[0], first)
    np.testing.assert_array_equal(got[1], which)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2))))
def test_groups_of_rows_are_those_of_numpy(rows: list[tuple[int, int]]) -> None:
    array = np.array(rows, np.int64).reshape(-1, 2)
    _, first, which = np.unique(array, axis=0, return_index=True, return_inverse=True)
    got = grouped(array)
    np.testing.assert_array_equal(got[0], first)
    np.testing.assert_array_equal(got[1], which.reshape(-1))
