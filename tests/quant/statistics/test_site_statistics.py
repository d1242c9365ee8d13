"""Statistics: parts add up to the whole, in whatever order and however they were cut."""

from __future__ import annotations

import random
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import CalibrationError, StorageError
from megtool.quant.statistics.running import RunningStatistics
from megtool.quant.statistics.site_statistics import BINS, MAX_SAMPLE_ROWS, ActivationStatistics
from tests.support.errors import raises
from tests.support.quant.seen import statistics_of
from tests.support.threads import kill_threads, refuse_threads


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_any_order_is_one_pass(seed: int, sizes: list[int], chance: random.Random) -> None:
    rng = np.random.default_rng(seed)
    parts = [
        (rng.normal(size=(n, 5)) * rng.choice([1e-3, 1, 1e3])).astype(np.float32) for n in sizes
    ]
    one = statistics_of(np.concatenate(parts), gram=True, sample=True)
    singles = [statistics_of(p, gram=True, sample=True) for p in parts]
    chance.shuffle(singles)
    merged = reduce(ActivationStatistics.merge, singles, ActivationStatistics.empty(5, gram=True))
    for other in (merged, statistics_of(*parts, gram=True, sample=True)):
        assert other.num_tokens == one.num_tokens
        np.testing.assert_array_equal(other.amax, one.amax)
        np.testing.assert_array_equal(other.histogram, one.histogram)
        np.testing.assert_allclose(other.abs_sum, one.abs_sum, rtol=1e-6)
        np.testing.assert_allclose(other.square_sum, one.square_sum, rtol=1e-6)
        assert one.gram is not None
        np.testing.assert_allclose(other.gram, one.gram, rtol=0, atol=1e-5 * one.gram.max())
        assert one.sample is not None
        assert other.sample is not None
        assert sorted(map(tuple, other.sample)) == sorted(map(tuple, one.sample))


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_a_sample_of_many_rows(sizes: list[int]) -> None:
    """Rows evenly spaced, the same however they came; of parts, in proportion to them."""
    numbers = np.split(np.arange(sum(sizes), dtype=np.float32)[:, None], np.cumsum(sizes)[:-1])
    one = statistics_of(*numbers, sample=True)
    whole = statistics_of(np.concatenate(numbers), sample=True)
    assert one.sample is not None
    np.testing.assert_array_equal(one.sample, whole.sample)
    assert min(sum(sizes), MAX_SAMPLE_ROWS // 2) <= len(one.sample) <= MAX_SAMPLE_ROWS
    assert len(set(np.diff(one.sample[:, 0]))) <= 1
    merged = reduce(ActivationStatistics.merge, [statistics_of(n, sample=True) for n in numbers])
    assert merged.sample is not None
    assert len(merged.sample) <= MAX_SAMPLE_ROWS
    assert len(merged.sample) >= min(sum(sizes), MAX_SAMPLE_ROWS // 2) - len(sizes)
    if sum(sizes) > 2 * MAX_SAMPLE_ROWS:
        for rows in numbers:
            here = np.isin(merged.sample, rows).sum() / len(merged.sample)
            assert here == pytest.approx(len(rows) / sum(sizes), abs=0.03)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@settings(max_examples=60, deadline=None)
def test_bins_by_arithmetic(values: list[float]) -> None:
    x = np.array(values, np.float32)[:, None]
    want = np.zeros(BINS, np.int64)
    for v in np.abs(x[:, 0]).astype(np.float64):
        share, exponent = np.frexp(v)
        octave = exponent - 1 + 40
        if v == 0 or octave < 0:
            want[0] += 1
        elif octave >= 64:
            want[-1] += 1
        else:
            want[1 + octave * 32 + int((share * 2 - 1) * 32)] += 1
    np.testing.assert_array_equal(statistics_of(x).histogram, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    one, other = (RunningStatistics(6, torch.device("cpu"), gram_width=6) for _ in range(2))
    assert one.add(x) is None
    assert other.add(x.float()) is None
    assert all(torch.equal(a, b) for a, b in zip(one.state, other.state, strict=True))


def test_rows_that_are_no_numbers_leave_no_trace() -> None:
    tally = RunningStatistics(3, torch.device("cpu"), gram_width=3, keep_sample=True)
    before = [t.clone() for t in tally.state]
    x = torch.ones(8, 3)
    x[5, 1] = torch.nan
    x[6, 1] = torch.inf
    assert tally.add(x) == 5
    assert all(torch.equal(a, b) for a, b in zip(before, tally.state, strict=True))
    assert tally.sample is not None
    assert not len(tally.sample)


def test_other_widths_do_not_add_up() -> None:
    with raises(CalibrationError, "3", "4 channels"):
        ActivationStatistics.empty(3).merge(ActivationStatistics.empty(4))


def test_sums_whose_threads_die_or_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.ones(4096, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        statistics = RunningStatistics(128, torch.device("cpu"))
        with monkeypatch.context() as patch:
            kill_threads(patch, {2})
            with pytest.raises(MemoryError):
                statistics.add(rows)
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            with raises(StorageError, "thread", hint="ulimit -u"):
                statistics.add(rows)
        assert not int(statistics.num_tokens)
        statistics.add(rows)
        assert int(statistics.num_tokens) == 4096
    finally:
        torch.set_num_threads(threads)
