"""Statistics of elements: histograms by power of two, sums of parts, and equality."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from megtool.digests.statistics import TensorStatistics
from megtool.dtypes import dtype
from megtool.tensors.box import Ints
from megtool.transport.strided import Array


def statistics(values: Array) -> TensorStatistics:
    out = TensorStatistics()
    out.add(values, dtype("float32"))
    return out


@pytest.fixture
def values() -> Array:
    generator = np.random.default_rng(0)
    scales = np.exp2(generator.integers(-6, 6, 5000))
    values = (generator.standard_normal(5000) * scales).astype("<f4")
    values[:7] = 0
    return values


def test_a_histogram_counts_by_sign_and_power_of_two(
    values: Array,
) -> None:
    counts: Counter[tuple[bool, int]] = Counter(
        (v < 0, math.frexp(v)[1] - 1) for v in values.tolist() if v
    )
    histogram = statistics(values).histogram
    assert histogram is not None
    first, negative, zeros, positive = histogram
    assert zeros == 7
    for is_negative, side in ((True, negative), (False, positive)):
        found = {(is_negative, first + n): count for n, count in enumerate(side) if count}
        assert found == {key: n for key, n in counts.items() if key[0] == is_negative}


def test_parts_add_up_to_the_whole(values: Array) -> None:
    whole, parts = statistics(values), statistics(values[:1234])
    parts.merge(statistics(values[1234:]))
    assert parts.histogram == whole.histogram
    assert (parts.count, parts.min, parts.max) == (whole.count, whole.min, whole.max)
    assert parts.std == pytest.approx(whole.std)


def test_equal_statistics_have_equal_histograms(
    values: Array,
) -> None:
    one, other = statistics(values), statistics(values.copy())
    assert one == other
    bins: Ints = one.bins.copy()
    bins[[120, 121]] += (1, -1)
    other.bins = bins
    assert one != other
    assert one != "statistics"
