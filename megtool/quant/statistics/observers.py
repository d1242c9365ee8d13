"""Observers: the amax of an activation from its statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError
from megtool.number_formats.small_floats import FP4
from megtool.quant.statistics.site_statistics import (
    BINS,
    BINS_PER_OCTAVE,
    OCTAVES,
    ActivationStatistics,
)

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
ObserverName = Literal["max", "percentile", "mse", "entropy"]
OBSERVERS: tuple[ObserverName, ...] = get_args(ObserverName)

_SAMPLES_PER_BIN = 8  # magnitudes per histogram bin: codes may be closer than bins
_COARSE, _FINE = 96, 32  # clipping candidates: a coarse grid, then a fine one around the best
_LOWEST_CLIP = 2.0**-7  # of amax
_LINEAR_BINS, _FIRST_BINS, _STRIDE = 2048, 128, 4  # of the entropy search, as in TensorRT


def observe_amax(
    statistics: ActivationStatistics,
    observer: str = "max",
    *,
    percentile: float = 99.99,
    largest: float = 448.0,
    kind: str = "fp8:tensor",
    smoothing_scale: Floats | None = None,
) -> float:
    """Compute the amax of inputs, at most their largest magnitude.

    - `max`: the largest magnitude.
    - `percentile`: a percentile of the magnitudes, linear within a bin.
    - `mse`: the clipping threshold with the least expected squared error.
    - `entropy`: the clipping threshold with the least KL divergence, as in TensorRT.

    `kind` is the format of inputs as in `formats.INPUT_PACKINGS`, with magnitudes up to `largest`.
    With dynamic scales (by token or group) nothing is clipped: `mse` and `entropy` are then `max`.
    With a `smoothing_scale`, which inputs are divided by, the clipping ratio stays the same.
    Returns 0 if all inputs are 0.

    Raises:
        CalibrationError: no tokens, or an unknown `observer`.
    """
    if observer not in OBSERVERS:
        raise CalibrationError(
            f"the observer {observer!r} is unknown", hint=f"known: {', '.join(OBSERVERS)}"
        )
    if not 0 < percentile <= 100:
        raise CalibrationError(f"the percentile is {percentile}", hint="above 0, at most 100")
    if not statistics.num_tokens:
        raise CalibrationError(
            "an amax of no tokens is not defined",
            hint="see expert_coverage.fill_missing_statistics",
        )
    largest_input = float(statistics.amax.max())
    amax = (
        largest_input
        if smoothing_scale is None
        else float((statistics.amax / smoothing_scale).max())
    )
    if observer == "max" or not largest_input:
        return amax
    if observer == "percentile":
        clip = _percentile(statistics, percentile)
    elif kind.partition(":")[2] != "tensor":
        return amax
    elif observer == "mse":
        clip = _min_error_clip(statistics, _round_function(kind, largest))
    else:
        counts = rebin_linearly(statistics, _LINEAR_BINS)
        bins = find_min_divergence_bins(counts, _levels(kind, largest), stride=_STRIDE)
        clip = largest_input * bins / _LINEAR_BINS
    return amax * min(clip / largest_input, 1.0)


def channel_amax(statistics: ActivationStatistics, smoothing_scale: Floats | None = None) -> Floats:
    """The amax of each channel, divided by `smoothing_scale`."""
    return statistics.amax if smoothing_scale is None else statistics.amax / smoothing_scale


def group_amax(
    statistics: ActivationStatistics, group: int, smoothing_scale: Floats | None = None
) -> Floats:
    """The amax of each group of `group` adjacent channels; the last may be smaller."""
    by_column = channel_amax(statistics, smoothing_scale)
    return np.maximum.reduceat(by_column, np.arange(0, len(by_column), group))


@cache
def bin_edges() -> Doubles:
    """The edges of histogram bins: `[BINS + 1]`."""
    place = np.arange(BINS)
    octave, part = np.divmod(place, BINS_PER_OCTAVE)
    begins = np.ldexp(1 + part / BINS_PER_OCTAVE, OCTAVES[0] + octave)
    edges = np.concatenate(([0.0], begins))
    edges.flags.writeable = False
    return edges


def _edges(statistics: ActivationStatistics) -> Doubles:
    """The edges of histogram bins, limited to the largest magnitude."""
    amax = float(statistics.amax.max())
    edges = np.minimum(bin_edges(), amax)
    edges[-1] = amax  # the last bin also counts larger values
    return edges


def _percentile(statistics: ActivationStatistics, percentile: float) -> float:
    """The percentile as in NumPy, with the elements of a bin spread evenly over it."""
    counts, edges = statistics.histogram, _edges(statistics)
    cumulative = np.cumsum(counts)
    last = int(cumulative[-1]) - 1
    rank = percentile / 100 * last

    def element(number: int) -> float:
        if number >= last:
            return float(edges[-1])
        bin_ = int(np.searchsorted(cumulative, number, side="right"))
        part = (number - int(cumulative[bin_] - counts[bin_]) + 0.5) / int(counts[bin_])
        return float(edges[bin_] + part * (edges[bin_ + 1] - edges[bin_]))

    low = int(rank)
    return element(low) + (rank - low) * (element(low + 1) - element(low))


def _min_error_clip(
    statistics: ActivationStatistics, rounded: Callable[[Doubles], Doubles]
) -> float:
    """The clipping threshold with the least squared error; the largest of equal ones."""
    used = np.flatnonzero(statistics.histogram)
    edges = _edges(statistics)
    parts = (np.arange(_SAMPLES_PER_BIN) + 0.5) / _SAMPLES_PER_BIN
    low, high = edges[used, None], edges[used + 1, None]
    sizes = (low + parts * (high - low)).ravel()
    counts = np.repeat(statistics.histogram[used] / _SAMPLES_PER_BIN, _SAMPLES_PER_BIN)

    def error(clip: float) -> float:
        off = rounded(sizes / clip) * clip - sizes
        return float(counts @ (off * off))

    amax = edges[-1]

    def best(clips: Doubles) -> float:
        return float(min(sorted(clips, reverse=True), key=error))

    # Even steps where clips matter most, even ratios below.
    half = _COARSE // 2
    clips = np.concatenate(
        (np.geomspace(_LOWEST_CLIP, 0.25, half, endpoint=False), np.linspace(0.25, 1, half))
    )
    coarse = best(amax * clips)
    nearest = int(np.argmin(np.abs(clips * amax - coarse)))
    around = np.linspace(clips[max(nearest - 1, 0)], clips[min(nearest + 1, len(clips) - 1)], _FINE)
    return best(np.append(amax * around, coarse))


def _round_function(kind: str, largest: float) -> Callable[[Doubles], Doubles]:
    """A function that rounds magnitudes, given as fractions of the threshold."""
    if kind.startswith("int"):
        return lambda x: np.minimum(np.rint(x * largest), largest) / largest
    if kind.startswith("fp8"):
        return lambda x: _to_e4m3(x * largest, largest) / largest
    levels = _levels(kind, largest)
    between = (levels[1:] + levels[:-1]) / 2

    def nearest(x: Doubles) -> Doubles:
        out: Doubles = levels[np.searchsorted(between, x)]
        return out

    return nearest


def _to_e4m3(x: Doubles, largest: float) -> Doubles:
    _, exponent = np.frexp(x)  # 4 significant bits, and steps of 2^-9 below 2^-6
    step = np.ldexp(1.0, np.maximum(exponent, -5) - 4)
    out: Doubles = np.minimum(np.rint(x / step) * step, largest)
    return out


@cache
def _levels(kind: str, largest: float) -> Doubles:
    """The representable magnitudes of a format as fractions of the largest one, ascending."""
    if kind.startswith("int"):
        levels = np.arange(int(largest) + 1) / largest
    elif kind.startswith("fp8"):
        codes = np.arange(127)
        exponent, mantissa = np.divmod(codes, 8)
        values = np.ldexp(
            (exponent > 0) * 8.0 + mantissa, np.maximum(exponent, 1) - 10
        )  # e4m3: a bias of 7, and 3 bits of mantissa
        levels = values / 448.0
    elif kind.startswith("fp4") or kind.startswith("nvfp4") or kind.startswith("mxfp4"):
        levels = np.array(FP4) / 6.0
    else:
        raise CalibrationError(f"the input format {kind!r} is unknown")
    levels.flags.writeable = False
    return levels


def rebin_linearly(statistics: ActivationStatistics, num: int) -> NDArray[np.int64]:
    """Convert the histogram to equal bins from 0 to the largest magnitude."""
    edges = _edges(statistics)
    cumulative = np.concatenate(([0], np.cumsum(statistics.histogram)))
    below = np.interp(np.linspace(0, edges[-1], num + 1), edges, cumulative)
    below[-1] = cumulative[-1]
    out: NDArray[np.int64] = np.diff(np.rint(below).astype(np.int64))
    return out


def find_min_divergence_bins(
    counts: NDArray[np.int64], levels: Doubles, *, first: int = _FIRST_BINS, stride: int = 1
) -> int:
    """Find the number of bins of a linear histogram to keep for the least KL divergence.

    For every number of bins, counts beyond go to the last bin, and counts that round to the same
    level are spread evenly over their nonzero bins; returns the number with the least
    Kullback-Leibler divergence, the largest of equal ones. Uniform `levels` get equal numbers of
    bins, as in TensorRT; others get the nearest bins.
    Source: S. Migacz, "8-bit inference with TensorRT", GTC 2017.
    """
    values = counts.astype(np.float64)
    values[0] = values[1]  # zeros are exact under any scale
    total = values.sum()
    uniform = bool(np.allclose(np.diff(levels), levels[1] - levels[0]))
    num = 1 << (len(levels) - 1).bit_length() if uniform else len(levels)
    between = (levels[1:] + levels[:-1]) / 2
    best, min_divergence = len(values), np.inf
    for keep in range(min(first, len(values)), len(values) + 1, stride):
        clipped = values[:keep]
        if uniform:
            part = np.digitize(np.arange(keep), np.linspace(0, keep, num + 1)) - 1
        else:
            part = np.searchsorted(between, (np.arange(keep) + 0.5) / keep)
        used = clipped != 0
        sums = np.bincount(part[used], weights=clipped[used], minlength=num)
        bins = np.bincount(part[used], minlength=num)
        after = np.where(used, (sums / np.maximum(bins, 1))[part], 0.0)
        before = clipped.copy()
        before[-1] += total - clipped.sum()
        divergence = _kl_divergence(before, after)
        if divergence <= min_divergence:
            best, min_divergence = keep, divergence
    return best


def _kl_divergence(p: Doubles, q: Doubles) -> float:
    """KL(p || q) of two unnormalized distributions."""
    nonzero = p > 0
    if not q.sum() or bool((q[nonzero] == 0).any()):
        return float("inf")
    p, q = p[nonzero] / p.sum(), q[nonzero] / q.sum()
    return float((p * np.log(p / q)).sum())
