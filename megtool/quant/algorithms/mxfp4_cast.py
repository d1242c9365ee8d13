"""Exact cast of MXFP4 weights to NVFP4: the same codes under block scales that are powers of two.

A block of NVFP4 is half a block of MXFP4 (or a whole one) with a scale in FP8 (E4M3) times a global
scale. FP8 has the powers of two from 2^-9 to 2^8. With a power of two as global scale, blocks
whose exponents span at most 17 keep every value. Exponents are found from the values: a block has
several if all of its codes can be halved or doubled, which widens the span.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megtool.errors import CalibrationError
from megtool.quant.algorithms.weight_grid import Grid
from megtool.quant.fake_quant.fake_quantize import second_scale
from megtool.quant.fake_quant.rounding_torch import E2M1_LARGEST, E4M3_LARGEST, to_e2m1

_LOWEST = -9
"""The exponent of FP8's smallest number."""


def solve_cast(weights: Mapping[str, Tensor], grid: Grid) -> tuple[float, dict[str, Tensor]]:
    """Solve the global amax and the amaxes `[out, blocks]` under which weights `[out, in]`, by
    module, that share a global scale keep their values.

    Raises:
        CalibrationError: a weight is not MXFP4, or its exponents span too much.
    """
    exponents = {n: find_exponents(w, grid.columns) for n, w in weights.items()}
    for name, (_, _, is_exact) in exponents.items():
        if not bool(is_exact.all()):
            count = int((~is_exact).sum())
            raise CalibrationError(
                f"{count:,} of {is_exact.numel():,} blocks are not MXFP4 numbers, so they cannot "
                "be cast to NVFP4 exactly",
                tensor=f"{name}.weight",
                hint="`cast` is for sources in MXFP4; keep this module by a rule, or quantize it "
                "without `cast`",
                error_id="inexact-cast",
            )
    used = [low[low <= high] for low, high, _ in exponents.values()]
    top = max((int(low.max()) for low in used if low.numel()), default=0)
    largest = round(math.log2(_largest_scale(grid)))
    bottom = top - largest + _LOWEST
    amaxes: dict[str, Tensor] = {}
    for name, (low, high, _) in exponents.items():
        is_zero = low > high
        chosen = torch.where(is_zero, top, low.clamp_min(bottom))
        beyond = ~is_zero & (high < bottom)
        if bool(beyond.any()):
            raise CalibrationError(
                f"{int(beyond.sum()):,} of {beyond.numel():,} blocks have scales down to "
                f"2^{int(high[beyond].min())}, and NVFP4 ends at 2^{bottom} where the largest "
                f"is 2^{top}, so they cannot be cast exactly",
                tensor=f"{name}.weight",
                hint="keep this module by a rule, or quantize it without `cast`",
                error_id="inexact-cast",
            )
        amaxes[name] = torch.ldexp(torch.tensor(E2M1_LARGEST), chosen.float())
    unit = float(second_scale(grid.algo, 1.0))
    return 2.0 ** (top - largest) * round(1 / unit), amaxes


def find_exponents(weight_OI: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest and the highest power of two, int32 `[out, blocks]`, over which all elements of
    a block are FP4 numbers, and whether there is one.

    The highest is below the lowest for blocks of zeros, which any scale fits.
    """
    blocks = weight_OI.double().reshape(len(weight_OI), -1, columns)
    amax = blocks.abs().amax(dim=2)
    share, exponent = torch.frexp(amax / E2M1_LARGEST)
    low = torch.where(share == 0.5, exponent - 1, exponent)
    codes = blocks * torch.exp2(-low.double())[..., None]
    is_exact = (codes == to_e2m1(codes.clone())).all(dim=2)
    # Twice the codes are integers: 1, 2, 3, 4, 6, 8, 12. Those that all divide by 2^n have n
    # higher exponents.
    twice = (codes * 2).long()
    room = torch.full(low.shape, 3)
    for n in (2, 1, 0):
        divides = (twice % 2 ** (n + 1) == 0).all(dim=2)
        room = torch.where(divides, room, n)
    is_zero = amax == 0
    return (
        torch.where(is_zero, 0, low).int(),
        torch.where(is_zero, -1, low + room).int(),
        is_exact,
    )


def _largest_scale(grid: Grid) -> float:
    """The largest power of two that a block scale may be."""
    codes = E4M3_LARGEST if grid.algo != "W4A8_NVFP4_FP8" else E4M3_LARGEST / E2M1_LARGEST
    return 2.0 ** math.floor(math.log2(codes))
