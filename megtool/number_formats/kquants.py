"""Encoders of GGUF's K-quants, and of its four- and five-bit blocks with importance weights.

A super-block has 256 weights in groups of 16 or 32, whose scales (and minima) are integers over a
scale of the super-block. Layouts: `block_q2_K` to `block_q6_K` of ggml-common.h; searches:
`quantize_row_*_ref` without importance weights, `quantize_row_*_impl` with them (Q3_K: always), of
ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.scale_search import (
    AffineSearch,
    Floats,
    fit_affine,
    fit_symmetric,
    fit_unsigned,
)

Codes = NDArray[np.integer[Any]]

SUPER_BLOCK = 256
_CHUNK = 1 << 16
"""Elements encoded at once: what is made of them stays in a core's cache."""

_LARGEST = 1e15
"""Squares of larger weights do not add up in float32; no scale is large enough for them."""

_FINE = AffineSearch(first=-0.9, step=0.05, last=36)


def encode_blocks(values: Floats, kind: str, importance: Floats | None = None) -> NDArray[np.uint8]:
    """Rows float32 `[rows, cols]` as blocks of `kind`, uint8 `[rows, row_bytes]`.

    `importance` float32 `[cols]` weighs the error of each column, as an importance matrix does: the
    mean square of what it is multiplied with. Numbers are finite, and rows whole blocks. Types of
    32 elements need importance weights.

    Raises:
        FloatingPointError: a scale is too large for float16.
    """
    rows, cols = values.shape
    if np.abs(values).max(initial=0) > _LARGEST:
        raise FloatingPointError("weights are too large for any scale")
    size = SUPER_BLOCK if kind in _SUPER_BLOCKS else 32
    blocks = values.reshape(-1, size)
    per_row = cols // size
    sigma2 = None
    if size == 32:
        sigma2 = np.repeat(np.mean(values * values, axis=1), per_row)
    weights = None if importance is None else importance.reshape(per_row, size)
    step = max(1, _CHUNK // size)
    out = []
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        for first in range(0, len(blocks), step):
            x = blocks[first : first + step]
            chosen = None
            if weights is not None:
                chosen = weights[np.arange(first, first + len(x)) % per_row]
            if sigma2 is None:
                out.append(_SUPER_BLOCKS[kind](x, chosen))
            elif chosen is not None:
                out.append(_encode_small(x, chosen, sigma2[first : first + len(x)], kind))
    encoded: NDArray[np.uint8] = np.concatenate(out).view(np.uint8).reshape(rows, -1)
    return encoded


def _groups(x: NDArray[np.float32], size: int) -> Floats:
    """Blocks `[S, 256]` as groups `[size, G]`, those of a super-block side by side."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _importance(x: Floats, importance: Floats, factor: float) -> Floats:
    """Weights of elements `[S, 256]`: importance times a magnitude, lifted by that of the block."""
    squares = x * x
    weights: Floats = importance * np.sqrt(factor * squares.mean(1, keepdims=True) + squares)
    return weights


def _magnitudes(groups: Floats) -> Floats:
    """Weights of elements `[n, G]`: their magnitude and the root mean square of their group."""
    squares = np.einsum("ng,ng->g", groups, groups)
    weights: Floats = np.abs(groups) + np.sqrt(squares / len(groups))
    return weights


def _halves(values: Floats) -> Codes:
    """Numbers `[S]` as float16, in bytes `[S, 2]`."""
    halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise FloatingPointError("a scale is too large for float16")
    return halves.view(np.uint8).reshape(-1, 2)


def _rounded(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _join(*parts: NDArray[np.generic]) -> Codes:
    """Parts `[S, ...]`, as the bytes of blocks `[S, bytes]`."""
    return np.concatenate([p.reshape(len(p), -1).view(np.uint8) for p in parts], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AffineBlock:
    """A K-quant with minima: groups of `size`, codes and scales up to `levels` and `scale_levels`.

    `plain` is the search without importance weights, whose weight of x is |x|, plus the root mean
    square of the group if `is_lifted`; `factor` is that of the mean square with them.
    """

    size: int
    levels: int
    scale_levels: int
    plain: AffineSearch
    is_lifted: bool
    factor: float
    pack: Callable[[Codes, Codes, Codes, Codes], Codes]

    def __call__(self, x: Floats, importance: Floats | None) -> Codes:
        """Super-blocks `[S, 256]` as bytes."""
        groups, count = _groups(x, self.size), SUPER_BLOCK // self.size
        if importance is None:
            weights = _magnitudes(groups) if self.is_lifted else np.abs(groups)
            scale, minimum, _ = fit_affine(groups, weights, self.levels, self.plain)
            d, scales = self._share(scale.reshape(-1, count))
            d_min, minima = self._share(minimum.reshape(-1, count))
        else:
            weights = _groups(_importance(x, importance, self.factor), self.size)
            scale, minimum, _ = fit_affine(groups, weights, self.levels, _FINE)
            totals = np.ascontiguousarray(weights.sum(0).reshape(-1, count).T)
            d, scales = self._search(scale.reshape(-1, count), totals)
            d_min, minima = self._search(minimum.reshape(-1, count), totals)
        step = (_rounded(d)[:, None] * scales).reshape(-1)
        codes = groups + (_rounded(d_min)[:, None] * minima).reshape(-1)
        codes /= np.where(step == 0, 1, step)
        np.rint(codes, out=codes)
        np.clip(codes, 0, self.levels, out=codes)
        codes[:, step == 0] = 0
        packed = codes.T.astype(np.uint8, order="C").reshape(-1, SUPER_BLOCK)
        halves = _join(_halves(d), _halves(d_min))
        return self.pack(packed, scales.astype(np.uint8), minima.astype(np.uint8), halves)

    def _share(self, values: Floats) -> tuple[Floats, Floats]:
        """The scale of a super-block by its largest group, and the codes of groups `[S, count]`."""
        largest = np.maximum(values.max(1), 0)
        factor = np.where(largest > 0, self.scale_levels / np.where(largest > 0, largest, 1), 0)
        codes = np.clip(np.rint(values * factor[:, None]), 0, self.scale_levels)
        return largest / np.float32(self.scale_levels), codes.astype(np.float32)

    def _search(self, values: Floats, totals: Floats) -> tuple[Floats, Floats]:
        """The best scale of a super-block for groups `[S, count]` of these weights."""
        columns = np.ascontiguousarray(np.maximum(values, 0).T)
        scale, codes = fit_unsigned(columns, totals, self.scale_levels)
        return scale, np.ascontiguousarray(codes.T)


def _pack_q2(codes: Codes, scales: Codes, minima: Codes, halves: Codes) -> Codes:
    return _join(scales | minima << 4, _two_bits(codes), halves)


def _pack_q4(codes: Codes, scales: Codes, minima: Codes, halves: Codes) -> Codes:
    return _join(halves, _six_bits(scales, minima), _nibbles(codes))


def _pack_q5(codes: Codes, scales: Codes, minima: Codes, halves: Codes) -> Codes:
    high = _bit_planes(codes >> 4)
    return _join(halves, _six_bits(scales, minima), high, _nibbles(codes & 15))


def _six_bits(scales: Codes, minima: Codes) -> Codes:
    """Eight scales and minima of six bits in twelve bytes."""
    low, high = np.split(scales, 2, axis=1)
    low_min, high_min = np.split(minima, 2, axis=1)
    return np.concatenate(
        [
            low | (high >> 4) << 6,
            low_min | (high_min >> 4) << 6,
            (high & 15) | (high_min & 15) << 4,
        ],
        axis=1,
    )


def _nibbles(codes: Codes) -> Codes:
    """Codes `[S, 256]` of four bits: of each 64, the second half lies above the first."""
    pairs = codes.reshape(-1, 4, 2, 32)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def _two_bits(codes: Codes) -> Codes:
    """Codes `[S, 256]` of two bits: of each 128, four runs of 32 above each other."""
    runs = codes.reshape(-1, 2, 4, 32)
    return runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6


def _bit_planes(bits: Codes) -> Codes:
    """Bits `[S, 256]`, one of each run of 32 in a byte `[S, 32]`."""
    return np.packbits(bits.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _encode_q3(x: Floats, importance: Floats | None) -> Codes:
    """Searched as by `quantize_row_q3_K_impl` also without importance, with the weights of Q4_K:
    `quantize_row_q3_K_ref` leaves groups as they are whose extreme is positive."""
    groups = _groups(x, 16)
    if importance is None:
        weights = _magnitudes(groups)
    else:
        weights = _groups(_importance(x, importance, 2), 16)
    scales, _ = fit_symmetric(groups, weights, 4)
    totals = np.ascontiguousarray(weights.sum(0).reshape(-1, 16).T)
    d, columns = fit_symmetric(np.ascontiguousarray(scales.reshape(-1, 16).T), totals, 32)
    codes = columns.T
    quants = _divide(groups, (_rounded(d)[:, None] * codes).reshape(-1), 4)
    six = (codes + 32).astype(np.uint8)
    low = (six[:, :8] & 15) | (six[:, 8:] & 15) << 4
    high = (six >> 4).reshape(-1, 4, 4)
    top = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    planes = _bit_planes(quants >> 2)
    return _join(planes, _two_bits(quants & 3), low, top, _halves(d))


def _encode_q6(x: Floats, importance: Floats | None) -> Codes:
    groups = _groups(x, 16)
    weights = groups * groups if importance is None else _groups(importance, 16)
    scales = fit_symmetric(groups, weights, 32)[0].reshape(-1, 16)
    rows = np.arange(len(scales))
    extreme = scales[rows, np.abs(scales).argmax(1)]
    is_zero = np.abs(extreme) < 1e-15
    factor = -128 / np.where(is_zero, 1, extreme)
    codes = np.minimum(np.rint(scales * factor[:, None]), 127)
    codes[is_zero] = 0
    d = np.where(is_zero, 0, 1 / factor).astype(np.float32)
    quants = _divide(groups, (_rounded(d)[:, None] * codes).reshape(-1), 32)
    quants[is_zero] = 0
    runs = quants.reshape(-1, 2, 4, 32)
    low = (runs[:, :, :2] & 15) | (runs[:, :, 2:] & 15) << 4
    return _join(low, _two_bits(quants >> 4), codes.astype(np.int8), _halves(d))


def _divide(groups: Floats, step: Floats, half: int) -> Codes:
    """Codes 0..2*half-1 of groups `[n, G]` with these steps, as `[S, 256]`."""
    codes = groups / np.where(step == 0, 1, step)
    np.rint(codes, out=codes)
    np.clip(codes, -half, half - 1, out=codes)
    codes += half
    return codes.T.astype(np.uint8, order="C").reshape(-1, SUPER_BLOCK)


def _encode_small(x: Floats, importance: Floats, sigma2: Floats, kind: str) -> Codes:
    """Blocks `[B, 32]` of Q4_0, Q4_1, Q5_0 or Q5_1; `sigma2` `[B]` is the mean square of rows."""
    levels = 15 if kind.startswith("Q4") else 31
    groups = np.ascontiguousarray(x.T)
    weights = np.ascontiguousarray((importance * np.sqrt(sigma2[:, None] + x * x)).T)
    if kind.endswith("_0"):
        half = (levels + 1) // 2
        d, codes = fit_symmetric(groups, weights, half)
        head, codes = _halves(d), codes + half
    else:
        d, minimum, codes = fit_affine(groups, weights, levels, _FINE)
        head = _join(_halves(d), _halves(-minimum))
    quants = codes.T.astype(np.uint8, order="C")
    low = (quants[:, :16] & 15) | (quants[:, 16:] & 15) << 4
    if levels == 15:
        return _join(head, low)
    return _join(head, np.packbits(quants >> 4, axis=1, bitorder="little"), low)


_SUPER_BLOCKS: dict[str, Callable[[Floats, Floats | None], Codes]] = {
    "Q2_K": _AffineBlock(
        size=16,
        levels=3,
        scale_levels=15,
        plain=AffineSearch(first=-0.5, step=0.1, last=15, is_absolute=True),
        is_lifted=False,
        factor=1,
        pack=_pack_q2,
    ),
    "Q3_K": _encode_q3,
    "Q4_K": _AffineBlock(
        size=32,
        levels=15,
        scale_levels=63,
        plain=AffineSearch(first=-1, step=0.1, last=20),
        is_lifted=True,
        factor=2,
        pack=_pack_q4,
    ),
    "Q5_K": _AffineBlock(
        size=32,
        levels=31,
        scale_levels=63,
        plain=AffineSearch(first=-0.5, step=0.1, last=15),
        is_lifted=True,
        factor=2,
        pack=_pack_q5,
    ),
    "Q6_K": _encode_q6,
}

K_QUANTS = tuple(_SUPER_BLOCKS)
"""Types with super-blocks that `encode_blocks` writes."""

WEIGHED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types of 32 elements whose search importance weights change."""
