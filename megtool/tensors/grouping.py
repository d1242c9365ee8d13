"""Groups of equal integers by sorting, without the imports of `np.unique`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct values in ascending order, as `np.unique`, which imports `numpy.ma` (12 ms)."""
    flat = np.sort(values, axis=None)
    return np.concatenate([flat[:1], flat[1:][flat[1:] != flat[:-1]]])


def grouped(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Equal values by number, rising: where each first stands, and the number of every value.

    Of a matrix, equal rows.
    """
    is_flat = values.ndim == 1
    order = np.argsort(values, kind="stable") if is_flat else np.lexsort(values.T[::-1])
    ordered = values[order]
    differs = ordered[1:] != ordered[:-1]
    new = np.ones(len(values), bool)
    new[1:] = differs if is_flat else differs.any(axis=1)
    group_ids = np.empty(len(values), np.int64)
    group_ids[order] = np.cumsum(new) - 1
    return order[new], group_ids
