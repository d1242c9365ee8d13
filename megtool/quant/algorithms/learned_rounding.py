"""Rounding learned by signed gradient descent on the output error of a layer.

Wenhua Cheng and others, "Optimize Weight Rounding via Signed Gradient Descent for the Quantization
of LLMs" (AutoRound, arXiv 2309.05516): a weight becomes s round(w / s + v), where each element has
its own v from -1/2 to 1/2 and the scale s follows a factor of the group's amax. Gradients pass
through roundings unchanged, and their signs, times a rate that falls linearly to 0, are what v
and the factor move by. On grids whose codes are symmetric the factors of the largest and of the
smallest weight scale one amax, so that a group has one factor.

The signs need no automatic differentiation: s is positive, so that the derivative of the error by
v has the sign of that by the weight; and that by s is the sum over the group of the gradient times
round(w / s + v) - w / s, without the second term where codes saturate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megtool.quant.algorithms.weight_grid import Grid
from megtool.quant.fake_quant.rounding_torch import round_e2m1_

LARGEST_OFFSET = 0.5
"""The largest v: half the distance between codes, where v is added."""

FACTORS = (0.5, 1.5)
"""The range of the factors of an amax."""

_CHUNK = 1 << 17  # elements at a time, which stay in the processor's cache
_WITHIN = 0.499  # of the distance to the next code: it rounds to the given one whatever ties do


@dataclass(slots=True, kw_only=True)
class LearnedRounding:
    """The rounding of one weight `[out, in]` while it is learned.

    Args:
        weight_OI: float32, times its smoothing scale.
        grid: its grid, with codes that can be chosen.
        amax: where scales begin, in the shape of `WeightQParams.amax`.
        global_amax: of formats with a scale per tensor; does not change.
        codes_OI: values of codes to begin with (None: the nearest ones). The weight is moved as
            little as gives it these codes.
    """

    weight_OI: Tensor
    grid: Grid
    amax: Tensor
    global_amax: float | None = None
    codes_OI: Tensor | None = None
    offset_OI: Tensor = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.offset_OI = torch.zeros_like(self.weight_OI)
        self.factor = torch.ones_like(self.amax)
        if self.codes_OI is not None:
            self.weight_OI = self.weight_OI.clone()
            scales = self._scales()
            for rows in self._chunks():
                weight, scale = self._grouped(self.weight_OI, rows), _part(scales, rows)
                codes = self._grouped(self.codes_OI, rows)
                weight.copy_(_move_to_codes(weight / scale, codes, self.grid) * scale)
            self.codes_OI = None

    @torch.no_grad()
    def values(self) -> Tensor:
        """The weight after rounding, `[out, in]`."""
        out, scales = torch.empty_like(self.weight_OI), self._scales()
        for rows in self._chunks():
            scale = _part(scales, rows)
            values = self._codes(self._points(rows, scale)[1]).mul_(scale)
            self._grouped(out, rows).copy_(self.grid.requantize(values, self.global_amax))
        return out

    @torch.no_grad()
    def step(self, gradient_OI: Tensor, rate: float) -> None:
        """Move by the signs of the derivatives; `gradient_OI` is that by `values`."""
        scales = self._scales()
        slopes = torch.zeros_like(scales)
        for rows in self._chunks():
            gradient = self._grouped(gradient_OI, rows)
            quotient, point = self._points(rows, _part(scales, rows))
            is_inside = point.abs() <= self._limit
            moves = gradient * is_inside
            slope = torch.linalg.vecdot(self._codes(point), gradient)
            slope = slope.sub_(torch.linalg.vecdot(quotient, moves)).unsqueeze(2)
            if self.amax.dim() == 0:
                slopes += slope.sum()
            else:
                slopes[rows] = slope
            offset = self._grouped(self.offset_OI, rows)
            offset.sub_(moves.sign_(), alpha=rate).clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)
        self.factor.sub_(slopes.sign().view_as(self.factor), alpha=rate).clamp_(*FACTORS)

    @torch.no_grad()
    def solve(self) -> tuple[Tensor, Tensor]:
        """The amax, and the codes as `WeightQParams.codes` has them."""
        codes, scales = torch.empty(self.weight_OI.shape, dtype=torch.int8), self._scales()
        for rows in self._chunks():
            values = self._codes(self._points(rows, _part(scales, rows))[1])
            self._grouped(codes, rows).copy_(self.grid.stored_codes(values))
        return self.amax * self.factor, codes

    def _points(self, rows: slice, scale: Tensor) -> tuple[Tensor, Tensor]:
        """w / s, and that plus v times the distance of codes there: `[rows, groups, columns]`."""
        quotient = self._grouped(self.weight_OI, rows) / scale
        offset = self._grouped(self.offset_OI, rows)
        if self.grid.is_integer:
            return quotient, quotient + offset
        # The power of two below the quotient; codes are as far apart as half of that, from 1 on.
        power = (quotient.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(1.0)
        return quotient, torch.addcmul(quotient, offset, power, value=0.5)

    @property
    def _limit(self) -> float:
        """Where codes saturate: half the last distance beyond the largest."""
        return self.grid.largest + (0.5 if self.grid.is_integer else 1.0)

    def _codes(self, points: Tensor) -> Tensor:
        """The values of the nearest codes; overwrites `points`."""
        if self.grid.is_integer:
            return self.grid.nearest_codes(points)
        return round_e2m1_(points)

    def _scales(self) -> Tensor:
        """The scales, `[out, groups, 1]` with ones for dimensions that share them."""
        scale = self.grid.scale(self.amax * self.factor, self.global_amax)
        if scale.dim() == 2:
            return scale[:, :, None]
        return scale.reshape(-1, 1, 1)

    def _grouped(self, x_OI: Tensor, rows: slice) -> Tensor:
        """Rows of a weight as `[rows, groups, columns]`."""
        part = x_OI[rows]
        return part.view(len(part), -1, self.grid.columns or part.shape[1])

    def _chunks(self) -> Iterator[slice]:
        rows, width = self.weight_OI.shape
        step = max(1, _CHUNK // width)
        return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _part(scales: Tensor, rows: slice) -> Tensor:
    return scales if len(scales) == 1 else scales[rows]


def _move_to_codes(quotient: Tensor, codes: Tensor, grid: Grid) -> Tensor:
    """The points nearest to w / s that round to the codes."""
    size = codes.abs()
    if grid.is_integer:
        above, below = torch.ones_like(size), torch.ones_like(size)
        is_last = (codes >= grid.largest) | (codes <= -grid.largest - 1)
    else:
        above = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        below = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0))
        is_last = size >= grid.largest
    sign = torch.where(codes == 0, 1.0, codes.sign())
    along = quotient * sign
    along = torch.maximum(along, size - _WITHIN * below)
    return torch.where(is_last, along, torch.minimum(along, size + _WITHIN * above)) * sign
