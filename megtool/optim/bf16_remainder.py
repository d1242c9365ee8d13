"""An fp32 value as a bf16 parameter and the 16 bits that it lacks, exactly.

With u the bits of the fp32 value, the parameter is the upper half of u + 0x8000 (rounded to
nearest, ties away from zero; torch's own cast rounds ties to even, which 16 bits cannot undo) and
the remainder is the lower half of u as a signed number, so that u = (parameter << 16) + remainder.
Transformer Engine's FusedAdam does the same for `store_param_remainders`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -(2**31)
_NAN = 0x7FC00000


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values of bf16 `high` and int16 `low`."""
    return high.float().view(torch.int32).add_(low).view(torch.float32)


def split(values: Tensor, *, high: Tensor, low: Tensor) -> None:
    """Write fp32 `values` into bf16 `high` and int16 `low`, of the same shape.

    `join` restores the same bits, and of a NaN a NaN of the same sign.
    """
    values = values.contiguous()
    # A search for NaN takes longer than a sum, and would synchronize a GPU.
    if values.device.type != "cpu" or not values.sum().isfinite():
        bits = values.view(torch.int32)
        # The halves of a NaN can be finite numbers, unless only its first mantissa bit is set.
        values = torch.where(values.isnan(), bits & _SIGN | _NAN, bits).view(torch.float32)
    halves = values.view(torch.int16).view(*values.shape, 2)  # lower first, as bytes are in memory
    low.copy_(halves[..., 0])
    carried = low.bitwise_right_shift(15)  # -1 where the parameter is rounded up
    torch.sub(halves[..., 1], carried, out=high.view(torch.int16))
