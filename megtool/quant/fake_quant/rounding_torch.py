"""Rounding to low-precision values with torch, on any device: values, not codes.

The results equal those of `number_formats` bit by bit. Nothing synchronizes with the host, so all
of it can be part of a CUDA graph. Every function takes and returns float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
_E2M1_VALUES = torch.tensor(
    [s * v for s in (1, -1) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
)
_TINY = torch.finfo(torch.float32).tiny


def to_e4m3(x: Tensor) -> Tensor:
    """To the nearest FP8 (E4M3) number, ties to even, saturated; overwrites `x`."""
    # The cast itself makes NaN of what is beyond the largest number.
    return x.clamp_(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor, *, half_down: bool = False) -> Tensor:
    """To the nearest FP4 (E2M1) number, ties to even (or towards zero), saturated.

    Numbers below zero that become it are minus zero; with `half_down`, zeros are too, as NVIDIA
    ModelOpt stores them.
    """
    size = x.abs().clamp_(max=E2M1_LARGEST)
    # Steps are 0.5 below 2, then 1, and 2 from 4 on.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    size.div_(step)
    size = size.sub_(0.5).ceil_().add_(0.0) if half_down else size.round_()
    size.mul_(step)
    return torch.where(x <= 0 if half_down else x < 0, -size, size)


def round_small_(x: Tensor, *, mantissa: int, smallest: float) -> Tensor:
    """Round to floats of `mantissa` bits, to the nearest, ties to even; in place.

    `x` is within the dtype's largest number, `smallest` its smallest normal one. Adding a number
    whose last bit is the rounding step lets the processor round; on a CPU this takes a third of the
    time of two casts. Values that become zero lose their sign.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    # Half as much again, so that sums with values below zero have the same last place.
    power.clamp_min_(smallest).mul_(1.5 * 2.0 ** (23 - mantissa))
    return x.add_(power).sub_(power)


def round_e4m3_(x: Tensor) -> Tensor:
    """`to_e4m3` in place, but for the sign of zero."""
    return round_small_(x.clamp_(-E4M3_LARGEST, E4M3_LARGEST), mantissa=3, smallest=2.0**-6)


def e2m1_values(bits: Tensor) -> Tensor:
    """FP4 (E2M1) numbers of their bits, float32; of each integer the lowest four count."""
    return _E2M1_VALUES.to(bits.device)[bits.long() & 15]


def round_e2m1_(x: Tensor) -> Tensor:
    """`to_e2m1` in place, but for the sign of zero."""
    return round_small_(x.clamp_(-E2M1_LARGEST, E2M1_LARGEST), mantissa=1, smallest=1.0)


def group_amax(x_TI: Tensor, per: int) -> Tensor:
    """The amax of every `per` columns, `[T, groups, 1]`."""
    sizes = x_TI.abs()
    if x_TI.device.type == "cpu" and x_TI.ndim == 2 and len(x_TI):
        # Reductions over short rows are slow there.
        return torch.nn.functional.max_pool1d(sizes, per).unsqueeze(-1)
    groups = x_TI.shape[-1] // per
    return sizes.view(*x_TI.shape[:-1], groups, per).amax(-1, keepdim=True)


def to_integers(x: Tensor, low: int, high: int) -> Tensor:
    """To the nearest integer, ties to even, within `low` and `high`; overwrites `x`."""
    return x.round_().clamp_(low, high).add_(0.0)  # zero has no sign


def plain_scale(amax: Tensor, largest: float) -> Tensor:
    """`amax / largest`, 1 under zeros: `megtool.number_formats.scales.modelopt_scale`."""
    top = torch.where(amax == 0, largest, amax).clamp_(min=_TINY)
    return (top / largest).clamp_(min=2.0**-149)


def power_scale(amax: Tensor, largest: float) -> Tensor:
    """The smallest power of two, of those in E8M0, that brings `amax` within `largest`:
    `megtool.number_formats.scales.modelopt_exponent`."""
    share, exponent = torch.frexp(amax / largest)
    exponent = torch.where(share == 0.5, exponent - 1, exponent)
    exponent = torch.where(share == 0, -127, exponent).clamp_(-127, 127)
    # As bits, for a power may be too small for arithmetic that flushes such numbers.
    bits = torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)


def block_scale(amax: Tensor, second: Tensor | float) -> Tensor:
    """NVFP4's scales of blocks in E4M3: see `number_formats.scales`. A block is scaled by this
    times `second`."""
    scale = amax / (E2M1_LARGEST * second)
    scale = torch.where(scale == 0, 1.0, scale)
    return to_e4m3(scale.clamp_(min=2.0**-9))
