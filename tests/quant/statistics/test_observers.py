"""Observers: against the raw numbers that the histogram was made of, and ModelOpt's calibrators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import CalibrationError
from megtool.quant.statistics.observers import (
    bin_edges,
    channel_amax,
    find_min_divergence_bins,
    group_amax,
    observe_amax,
    rebin_linearly,
)
from megtool.quant.statistics.site_statistics import BINS, ActivationStatistics
from tests.support.quant.seen import statistics_of

BIN = 1 / 32  # a bin's width, at most, of what is in it


def heavy(seed: int = 0, rows: int = 4000) -> np.ndarray:
    """A long tail, as activations have."""
    x = np.random.default_rng(seed).standard_t(4, (rows, 16))
    return x.astype(np.float32)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200),
    st.floats(50, 100),
)
@settings(max_examples=60, deadline=None)
def test_percentile_lies_between_its_neighbours(values: list[float], percentile: float) -> None:
    x = np.array(values, np.float32)[:, None]
    found = observe_amax(statistics_of(x), "percentile", percentile=percentile)
    sizes = np.abs(x)
    low = np.percentile(sizes, percentile, method="lower")
    high = np.percentile(sizes, percentile, method="higher")
    tiny = 2.0**-40
    assert low * (1 - BIN) - tiny <= found <= high * (1 + BIN) + tiny
    assert found <= sizes.max()


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9, 99.99, 100.0])
def test_percentile_as_numpys(percentile: float) -> None:
    x = heavy()
    want = np.percentile(np.abs(x), percentile)
    found = observe_amax(statistics_of(x), "percentile", percentile=percentile)
    assert found == pytest.approx(want, rel=BIN / 2)


def rounded(x: torch.Tensor, amax: float, kind: str) -> torch.Tensor:
    """What raw numbers become."""
    if kind.startswith("fp8"):
        scale = amax / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    top = {"int8": 127, "int4": 7}[kind.partition(":")[0]]
    return (x / amax * top).round().clamp(-top, top) / top * amax


@pytest.mark.parametrize(
    ("kind", "largest"), [("int8:tensor", 127.0), ("int4:tensor", 7.0), ("fp8:tensor", 448.0)]
)
def test_least_error_as_by_trying_all(kind: str, largest: float) -> None:
    x = torch.from_numpy(heavy(1))
    top = float(x.abs().max())

    def error(clip: float) -> float:
        return float((rounded(x, clip, kind) - x).square().mean())

    least = min(error(top * c) for c in np.linspace(0.02, 1, 400))
    found = observe_amax(statistics_of(x.numpy()), "mse", kind=kind, largest=largest)
    assert found <= top
    assert error(found) <= 1.02 * least
    if kind != "fp8:tensor":
        assert error(found) < 0.9 * error(top)


def test_least_error_of_four_bit_floats() -> None:
    """E2M1 has eight magnitudes, here written out."""
    x = heavy(2)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6

    def error(clip: float) -> float:
        near = np.abs(np.abs(x)[..., None] / clip - levels).argmin(-1)
        return float(np.square(levels[near] * clip - np.abs(x)).mean())

    found = observe_amax(statistics_of(x), "mse", kind="fp4:tensor", largest=6.0)
    top = float(np.abs(x).max())
    assert error(found) <= 1.02 * min(error(top * c) for c in np.linspace(0.05, 1, 60))


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_of_a_linear_histogram_as_modelopts(seed: int) -> None:
    histogram = pytest.importorskip("modelopt.torch.quantization.calib.histogram")
    x = np.abs(heavy(seed, 600))
    counts, edges = np.histogram(x, 256)
    want = histogram._compute_amax_entropy(counts.copy(), edges, 8, False, 8, 128)
    bins = find_min_divergence_bins(counts, np.arange(128) / 127, stride=8)
    assert edges[bins] == pytest.approx(float(want))


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("how", ["percentile", "mse", "entropy"])
def test_near_what_modelopt_finds(how: str) -> None:
    """It searches a linear histogram of 2048 bins; ours is finer below and coarser above."""
    calib = pytest.importorskip("modelopt.torch.quantization.calib")
    x = torch.from_numpy(heavy(3))
    calibrator = calib.HistogramCalibrator(num_bits=8)
    calibrator.collect(x)
    more = {"stride": 64} if how == "entropy" else {}
    want = float(calibrator.compute_amax(how, percentile=99.9, **more))
    found = observe_amax(
        statistics_of(x.numpy()), how, percentile=99.9, kind="int8:tensor", largest=127.0
    )
    top = float(x.abs().max())
    assert 0 < found <= top
    if how == "percentile":
        assert found == pytest.approx(want, rel=0.01)
        return

    def error(clip: float) -> float:
        return float((rounded(x, clip, "int8") - x).square().mean())

    # Many clips are nearly as good: compare what they are good for.
    if how == "mse":
        assert error(found) <= 1.02 * error(want)
    else:
        assert found == pytest.approx(want, rel=0.25)


def test_entropy_clips_a_lone_outlier_and_not_a_flat_top() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 8)).astype(np.float32)
    x[0, 0] = 60
    clipped = observe_amax(statistics_of(x), "entropy", kind="int8:tensor", largest=127.0)
    assert clipped < 20
    assert observe_amax(statistics_of(x), "entropy", kind="fp8:tensor") <= 60
    flat = rng.uniform(-1, 1, (4000, 8)).astype(np.float32)
    assert observe_amax(statistics_of(flat), "entropy", kind="int8:tensor", largest=127.0) > 0.9


@given(
    st.integers(0, 10**6), st.integers(-30, 20), st.sampled_from(["percentile", "mse", "entropy"])
)
@settings(max_examples=20, deadline=None)
def test_within_what_was_seen_at_any_magnitude(seed: int, power: int, how: str) -> None:
    x = np.random.default_rng(seed).normal(size=(64, 4)).astype(np.float32)
    one = observe_amax(statistics_of(x), how, kind="int8:tensor", largest=127.0)
    assert 0 < one <= np.abs(x).max()
    other = observe_amax(statistics_of(np.ldexp(x, power)), how, kind="int8:tensor", largest=127.0)
    assert other == pytest.approx(float(np.ldexp(one, power)), rel=1e-6)


def test_columns_and_groups() -> None:
    x = np.array([[1, -2, 3, 0], [-4, 1, 1, 0.5]], np.float32)
    s = statistics_of(x)
    columns = np.array([4, 1, 2, 1], np.float32)
    assert observe_amax(s) == 4.0
    assert observe_amax(s, smoothing_scale=columns) == 2.0
    assert list(channel_amax(s, columns)) == [1, 2, 1.5, 0.5]
    assert list(group_amax(s, 2)) == [4, 3]
    assert list(group_amax(s, 3)) == [4, 0.5]
    assert observe_amax(s, "percentile", smoothing_scale=columns, percentile=100.0) == 2.0
    assert observe_amax(s, "mse", kind="fp8:token") == 4.0


def test_zeros_alone_and_nothing_at_all() -> None:
    zeros = statistics_of(np.zeros((5, 3), np.float32))
    for how in ("max", "percentile", "mse", "entropy"):
        assert observe_amax(zeros, how) == 0.0
    with pytest.raises(CalibrationError, match="no tokens"):
        observe_amax(ActivationStatistics.empty(3))
    with pytest.raises(CalibrationError, match="'median'"):
        observe_amax(zeros, "median")


def test_bins_and_their_linear_counterparts() -> None:
    edges = bin_edges()
    assert len(edges) == BINS + 1
    assert (np.diff(edges) > 0).all()
    x = heavy(4)
    s = statistics_of(x)
    counts = rebin_linearly(s, 2048)
    assert counts.sum() == x.size
    want, _ = np.histogram(np.abs(x), 2048, (0, float(np.abs(x).max())))
    apart = np.abs(np.cumsum(counts) - np.cumsum(want)).max()
    assert apart <= s.histogram.max()
