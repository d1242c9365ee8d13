"""Searches for the scales of small groups of weights, as llama.cpp's quantizer makes them.

All arrays are `[n, G]`: the `n` elements of a group lie along the first axis, so that sums over a
group are sums of rows. Weighted squared errors are computed from sums of products, so a candidate
takes few passes. Source of the searches: `make_qkx2_quants`, `make_qkx3_quants`, `make_qx_quants`
and `make_qp_quants` of ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]

_TINY = 1e-15
"""Groups of smaller magnitudes are zero."""
_EQUAL = 1e-6
"""Where the variance of codes is a smaller share of their square, it is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSearch:
    """Candidates for the step of a group: the range above its best minimum so far, in
    `levels + first + i * step` parts, i from 0 to `last`. With `is_absolute` the error is that of
    magnitudes, not of squares."""

    first: float
    step: float
    last: int
    is_absolute: bool = False

    def parts(self, levels: int) -> list[np.float32]:
        """In how many parts."""
        return [np.float32(levels + self.first + i * self.step) for i in range(self.last + 1)]


def weighted_sum(a: Floats, b: Floats) -> Sums:
    """The sum over each group of products, `[G]`."""
    sums: Sums = np.einsum("ng,ng->g", a, b).astype(np.float64)
    return sums


def fit_affine(
    x: Floats, weights: Floats, levels: int, search: AffineSearch
) -> tuple[Floats, Floats, Floats]:
    """The best `scale`, `minimum` and `codes` `[n, G]` of x ~ scale * code - minimum.

    Codes are in 0..levels, and `minimum` is not negative.
    """
    low = np.minimum(x.min(0), 0)
    span = x.max(0) - low
    is_flat = span <= 0
    unit = np.where(is_flat, 1, span) / np.float32(levels)
    y = (x - low) * (1 / unit)
    zero = (-low / unit).astype(np.float64)  # where 0 lies among the codes
    sum_w = weights.sum(0, dtype=np.float32).astype(np.float64)
    wy = weights * y
    sum_wy, sum_wyy = wy.sum(0, dtype=np.float32).astype(np.float64), weighted_sum(wy, y)
    codes, product = np.empty_like(x), np.empty_like(x)
    best_scale, best_min = np.ones_like(sum_w), np.zeros_like(sum_w)
    chosen = np.array([np.ones_like(span), np.zeros_like(span)])  # factor and shift of the codes
    np.rint(y, out=codes)
    best = _affine_error(codes, y, weights, best_scale, best_min, product, search)
    for parts in search.parts(levels):
        factor = parts / (levels - best_min.astype(np.float32))
        shift = -factor * best_min.astype(np.float32)
        _round_affine(y, factor, shift, levels, codes)
        np.multiply(weights, codes, out=product)
        sum_wl = product.sum(0, dtype=np.float32).astype(np.float64)
        sum_wll, sum_wly = weighted_sum(product, codes), weighted_sum(product, y)
        determinant = sum_w * sum_wll - sum_wl * sum_wl
        is_regular = determinant > _EQUAL * sum_w * sum_wll
        safe = np.where(is_regular, determinant, 1)
        scale = (sum_w * sum_wly - sum_wy * sum_wl) / safe
        minimum = (sum_wll * sum_wy - sum_wl * sum_wly) / safe
        is_above = is_regular & (minimum > zero)
        if is_above.any():
            through_zero = (sum_wly - zero * sum_wl) / np.where(is_above, sum_wll, 1)
            scale, minimum = (
                np.where(is_above, through_zero, scale),
                np.where(is_above, zero, minimum),
            )
        if search.is_absolute:
            error = _affine_error(codes, y, weights, scale, minimum, product, search)
        else:
            error = sum_wyy + scale * (scale * sum_wll + 2 * (minimum * sum_wl - sum_wly))
            error += minimum * (minimum * sum_w - 2 * sum_wy)
        is_better = is_regular & (error < best)
        for target, new in ((best, error), (best_scale, scale), (best_min, minimum)):
            np.copyto(target, new, where=is_better)
        np.copyto(chosen, (factor, shift), where=is_better)
    _round_affine(y, chosen[0], chosen[1], levels, codes)
    codes[:, is_flat] = 0
    scale = np.where(is_flat, 0, best_scale * unit).astype(np.float32)
    minimum = -(low + np.where(is_flat, 0, best_min * unit)).astype(np.float32)
    return scale, np.maximum(minimum, 0), codes


def _round_affine(y: Floats, factor: Floats, shift: Floats, levels: int, out: Floats) -> None:
    np.multiply(y, factor, out=out)
    out += shift
    np.rint(out, out=out)
    np.clip(out, 0, levels, out=out)


def _affine_error(
    codes: Floats,
    y: Floats,
    weights: Floats,
    scale: Sums,
    minimum: Sums,
    out: Floats,
    search: AffineSearch,
) -> Sums:
    """The weighted error of each group, computed element by element."""
    np.multiply(codes, scale.astype(np.float32), out=out)
    out += minimum.astype(np.float32)
    out -= y
    if search.is_absolute:
        np.abs(out, out=out)
        return weighted_sum(out, weights)
    return weighted_sum(out * weights, out)


def fit_symmetric(x: Floats, weights: Floats, half: int) -> tuple[Floats, Floats]:
    """The best `scale` of x ~ scale * code, codes in -half..half-1, and those codes `[n, G]`."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    is_zero = np.abs(extreme) < _TINY
    y = (x / np.where(is_zero, 1, extreme)).astype(np.float32)
    wy = weights * y
    codes, product = np.empty_like(x), np.empty_like(x)
    best = np.full(x.shape[1], -1.0)
    best_scale = np.zeros_like(best)
    best_factor = np.full(x.shape[1], -half, np.float32)
    for i in (0, *range(-9, 0), *range(1, 10)):
        factor = np.float32(-(half + 0.1 * i))
        _round_to(y, factor, half, codes)
        sum_wly = weighted_sum(wy, codes)
        np.multiply(codes, codes, out=product)
        sum_wll = weighted_sum(weights, product)
        scale = sum_wly / np.where(sum_wll > 0, sum_wll, 1)
        is_better = (sum_wll > 0) & (scale * sum_wly > best)
        np.copyto(best, scale * sum_wly, where=is_better)
        np.copyto(best_scale, scale, where=is_better)
        best_factor[is_better] = factor
    _round_to(y, best_factor, half, codes)
    codes[:, is_zero] = -half
    return np.where(is_zero, 0, best_scale * extreme).astype(np.float32), codes


def _round_to(y: Floats, factor: np.float32 | Floats, half: int, out: Floats) -> None:
    np.multiply(y, factor, out=out)
    np.rint(out, out=out)
    np.clip(out, -half, half - 1, out=out)


def fit_unsigned(x: Floats, weights: Floats, levels: int) -> tuple[Floats, Floats]:
    """The best `scale` of x ~ scale * code, x and codes in 0..levels, and the codes `[n, G]`."""
    largest = x.max(0)
    is_zero = largest < _TINY
    y = (x / np.where(is_zero, 1, largest)).astype(np.float32)
    codes = np.empty_like(x)
    best = np.full(x.shape[1], np.inf)
    best_factor = np.full(x.shape[1], levels, np.float32)
    for i in (0, *range(-4, 0), *range(1, 5)):
        factor = np.float32(levels + 0.1 * i)
        np.minimum(np.rint(y * factor), levels, out=codes)
        difference = y - codes / factor
        error = weighted_sum(weights * difference, difference)
        is_better = error < best
        np.copyto(best, error, where=is_better)
        best_factor[is_better] = factor
    np.minimum(np.rint(y * best_factor), levels, out=codes)
    scale = _descend(y, weights, codes, levels)
    codes[:, is_zero] = 0
    return np.where(is_zero, 0, scale * largest).astype(np.float32), codes


def _descend(y: Floats, weights: Floats, codes: Floats, levels: int) -> Sums:
    """Improve codes in place, one of each group at a time, and return the best scale of them."""
    sum_wly = weighted_sum(weights * y, codes)
    sum_wll = weighted_sum(weights * codes, codes)
    for _ in range(5):
        has_changed = False
        for row, values in enumerate(y):
            w, old = weights[row].astype(np.float64), codes[row].astype(np.float64)
            rest_ly, rest_ll = sum_wly - w * values * old, sum_wll - w * old * old
            is_usable = (rest_ly > 0) & (rest_ll > 0)
            ratio = np.divide(values * rest_ll, rest_ly, where=is_usable, out=np.zeros_like(w))
            new = np.minimum(np.rint(ratio), levels)
            new_ly, new_ll = rest_ly + w * values * new, rest_ll + w * new * new
            is_better = is_usable & (new != old) & (new_ll > 0)
            is_better &= new_ly * new_ly * sum_wll > sum_wly * sum_wly * new_ll
            if is_better.any():
                has_changed = True
                codes[row][is_better] = new[is_better]
                np.copyto(sum_wly, new_ly, where=is_better)
                np.copyto(sum_wll, new_ll, where=is_better)
        if not has_changed:
            break
    return np.divide(sum_wly, sum_wll, where=sum_wll > 0, out=np.zeros_like(sum_wly))
